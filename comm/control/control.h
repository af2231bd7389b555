// What processes of one job tell each other besides tensors: who is there, who failed and why, who
// left, who works on something that takes long. One TCP connection from each process to process 0.
//
// [Note: who may join] Both sides of a new connection prove with fresh numbers that they know the
// secret; after that, bytes are neither signed nor encrypted. Whoever cannot prove it, says
// something else, is slow, belongs to another job, or comes twice is refused and named on process
// 0, which goes on waiting for the others. Without a secret only connections from this very host
// are taken, unless `insecure`. With file: process 0 draws a secret itself, and who may read the
// file may join; with `hand_out`, who is given it.
//
// [Note: one failure of a job] A job fails once. Process 0 puts what processes report in an order,
// and tells the first to all: all see one reason. It is told last in its own process, after all
// others have it, because that process may end then.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

struct ControlOptions {
  int process = 0, num_processes = 1;
  int num_ranks = 1;  ///< of this process, that say what they call: see say_call()
  /// "tcp:HOST:PORT", or "tcp:HOST:PORT+N" with N further ports after PORT: process 0 listens at
  /// the first that is free, on any address of its host, and the others try all. "file:PATH":
  /// process 0 leaves its addresses in a private file that all see. Not looked at for one process.
  std::string address = {};
  /// Instead of an address, where something else connects the processes already: gives process 0's
  /// text, of at most 4096 bytes, to all. Called once in each process.
  std::function<std::string(std::string own)> hand_out = {};
  std::string secret = {};  ///< see [Note: who may join]; not looked at with file: or hand_out
  bool insecure = false;    ///< anyone who can connect may join, if there is no secret
  std::string job = {};     ///< what the launcher calls the job, at most 256 bytes
  std::chrono::milliseconds deadline = std::chrono::seconds(60);  ///< to join, and for all_gather()
  /// On process 0: who was refused, and why. From a thread of Control, or from join().
  std::function<void(const std::string& note)> on_refused = {};
  /// Who is still waited for, and where: when it has lasted a tenth of the deadline, at most 5 s,
  /// and again whenever it has lasted twice as long. From a thread of Control, or from join().
  std::function<void(const std::string& note)> on_waiting = {};
};

/// The end of one process. Thread-safe.
class Control {
 public:
  /// Returns once all processes are connected at the same time. Throws InvalidArgument; IoError;
  /// CommError that names who is missing after the deadline.
  static std::shared_ptr<Control> join(const ControlOptions& options);
  /// Instead of join(), by a process that cannot: tells the others why, so that they do not wait
  /// for it. Tries it for two seconds, and then gives up; not with `hand_out`.
  static void decline(const ControlOptions& options, std::string_view why) noexcept;
  /// Leaves: the others learn that this process has left in order. Where process 0 leaves, nobody
  /// learns any more of the others.
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int process() const;
  int num_processes() const;
  /// "process 1 (h1, pid 4711)"
  std::string name(int process) const;

  /// All processes' `own`, process by process. Collective: `label` must be equal, and the texts
  /// have at most kMaxGatherNbytes together. Throws InvalidArgument, or CommError with the failure
  /// of the job: also if one does not call it within the deadline, or has left.
  std::vector<std::string> all_gather(std::string_view label, std::string own);
  static constexpr std::size_t kMaxGatherNbytes = std::size_t{64} << 20;

  /// How long who finds its process failing waits for the reason of the job, which may be
  /// another's: longer than process 0, which is told last, may take to be told.
  static constexpr std::chrono::milliseconds kPatience{1500};
  /// What the job has failed with, or fails with within `time`; nothing if it does not.
  std::optional<std::string> failure_within(std::chrono::milliseconds time) const;

  bool has_failed() const noexcept;

  /// Runs `work`, which all processes do. What one of them throws the others are told as the
  /// failure of the job. A CommError, which may come of another's end, is replaced by that failure
  /// if it is another's.
  void run_together(const std::function<void()>& work);

  /// Fails the job on every process, unless it has failed already. Returns once the others have
  /// been told, or after about a second. Of a message of more than 16 KiB the rest is left out.
  void fail(std::string message) noexcept;

  /// Called in order, one at a time, from a thread of Control that they must not hold up: they do
  /// not call all_gather(), and do not drop the last reference to Control.
  struct Events {
    std::function<void(const std::string& message)> on_failure;
    std::function<void(bool paused)> on_pause;  ///< no deadline should run while it is paused
  };
  /// At most once. A failure or a pause that is there already is told at once.
  void listen(Events events);

  /// While the result lives, which may be longer than Control, no deadline runs on any process.
  std::shared_ptr<const void> pause();

  /// Whether the failure `message` of a job says that a process was lost, by no fault of what it
  /// was told to do: another try may go well.
  static bool tells_of_loss(std::string_view message);

  // Of ranks, which each process counts from 0.

  /// What `rank` of this process called last, at most 200 bytes of it. The others know it within a
  /// second.
  void say_call(std::string_view text, int rank = 0) noexcept;
  /// Says that `rank` of this process calls no more. The others know it within a second.
  void say_left(int rank) noexcept;
  /// Whether that process has left in order, or its `rank` has said so.
  bool has_left(int process, int rank = 0) const;
  /// What `rank` of that process said that it called last; empty: nothing yet.
  std::string last_call(int process, int rank = 0) const;

 private:
  class Impl;
  explicit Control(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm

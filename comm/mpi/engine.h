// Who calls MPI, one thread at a time. Private to comm.
//
// [Note: who drives MPI] MPI moves messages only while it is called. Whoever waits for a message
// drives all of them: it looks, yields its core, and after a while sleeps between its looks. So a
// message wakes no thread on its way. A thread of the transport starts and ends MPI, and drives
// what nobody waits for: at once the messages whose transfers were dropped, and from time to time
// the others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi/library.h"
#include "comm/world/futex.h"

namespace tessera::comm {

/// A message, from its post until it is done.
struct MpiMessage {
  enum State : std::uint32_t { kPending, kDone, kFailed };

  bool receives = false;
  int process = 0;  ///< the peer
  std::uint32_t tag = 0;
  std::byte* data = nullptr;  ///< written only where it receives
  std::size_t nbytes = 0;
  std::shared_ptr<const void> owner = {};  ///< the engine's: of `data`
  std::string error = {};                  ///< of kFailed
  std::atomic<std::uint32_t> state = kPending;
  std::atomic<int> num_asleep = 0;     ///< threads that sleep until `state` changes
  std::atomic<bool> is_alone = false;  ///< nobody will wait for it

  // The driver's.
  std::vector<MpiLibrary::Request> requests = {};  ///< of its chunks, in their order
  std::size_t num_ended = 0;                       ///< of the requests
  std::size_t num_come = 0;                        ///< bytes, where it receives
  bool last_has_come = false;
  std::vector<std::vector<std::byte>> too_long = {};  ///< chunks that `data` has no room for
};

/// [Note: lengths of messages] A message goes in chunks of a fixed length, and ends with a shorter
/// one, which may be empty: so whoever receives it learns its length, whatever was expected. Each
/// chunk is looked at before it is received. Open MPI 4.1.4 writes a large message that is too long
/// past the end of its buffer (shared memory, one copy), and only then says that it is truncated.
class MpiEngine : public std::enable_shared_from_this<MpiEngine> {
 public:
  MpiEngine(std::unique_ptr<MpiLibrary> library, std::size_t chunk_nbytes)
      : library_(std::move(library)), chunk_nbytes_(chunk_nbytes) {}

  /// The work of the transport's thread, until stop().
  void run();

  /// Waits until MPI has started. Throws CommError if it does not, or not before the deadline.
  void wait_started(Clock::time_point deadline);
  const MpiLibrary& library() const { return *library_; }

  /// Throws what has ended the thread, if something has.
  void post(std::shared_ptr<MpiMessage> message);
  /// Returns once the message is no longer pending (true), or at the deadline (false).
  bool wait(MpiMessage& message, Clock::time_point deadline);
  /// Nobody will wait for it.
  void leave_alone(MpiMessage& message);

  /// Lets run() return: it ends MPI if `orderly`, and no message is on its way. False: it has not
  /// returned before the deadline.
  bool stop(bool orderly, Clock::time_point deadline);

 private:
  enum Phase : std::uint32_t { kStarting, kRunning, kEnded };
  using Messages = std::vector<std::shared_ptr<MpiMessage>>;

  void serve();
  /// Looks at all messages once, unless another thread is looking. Returns whether it did.
  bool drive();
  void look();
  void begin(MpiMessage& message);
  bool has_ended(MpiMessage& message);
  bool has_come(MpiMessage& message);
  void fail(MpiMessage& message, const std::string& got);
  static void settle(MpiMessage& message);
  void give_up(std::exception_ptr error);
  void enter(Phase phase);
  void ring();

  const std::unique_ptr<MpiLibrary> library_;
  const std::size_t chunk_nbytes_;

  std::mutex mutex_;                     // held for moments
  Messages posts_;                       // by mutex_
  bool stopped_ = false;                 // by mutex_
  bool orderly_ = false;                 // by mutex_
  std::exception_ptr error_;             // by mutex_: what has ended all messages
  std::atomic<bool> is_idle_ = true;     // the thread sleeps for long
  std::atomic<std::uint32_t> bell_ = 0;  // rung for the thread
  std::atomic<std::uint32_t> phase_ = kStarting;

  std::mutex driver_;  // held by the thread that calls MPI
  Messages pending_;   // by driver_, in the order of their posts
  // By driver_, of this look: few, of process and tag.
  std::vector<std::pair<int, std::uint32_t>> awaited_;
  int num_alone_ = 0;                    // by driver_: of pending_
  Messages given_up_;                    // by driver_, kept with what they own
  std::shared_ptr<MpiEngine> for_good_;  // itself, when MPI may still read or write what it owns
};

}  // namespace tessera::comm

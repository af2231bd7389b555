// Where ranks that share memory meet: they compare what they call, do the work together, and leave
// when all of it is done. Knows nothing of tensors.
//
// [Note: one meeting] A collective is one meeting, found by its sequence number. Each rank brings a
// slot (its pointers) and sleeps; the last to come makes it ready. From then on the work (chunks of
// a block per rank) can be done by whoever runs: a rank takes the chunks of its own block, then
// helps with the others', and the last chunk lets everyone go. So a small collective is done by the
// last to come while the rest sleep (one wake-up each), and a big one keeps every core busy however
// few there are. Nobody waits for a particular rank once a meeting is ready: it always completes,
// even if the world fails meanwhile, so no rank can take its memory away from under another.
//
// [Note: one failure] A world fails once: with the first mismatch, deadline, departure or abort.
// Every meeting of all its groups that is not ready fails with that error, and so do all later
// ones. Ranks in messages are ranks of the world, whatever the group.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/threads/deadline_clock.h"

namespace tessera::comm {

class Rendezvous;

/// What all groups of one world share.
class World {
 public:
  /// `on_failure`, `flight`: as in ThreadsOptions. Throws InvalidArgument unless deadline > 0.
  explicit World(std::chrono::milliseconds deadline,
                 std::function<void(const std::string& message)> on_failure = {},
                 std::shared_ptr<FlightRecorder> flight = {});

  /// Null: nothing is recorded.
  FlightRecorder* flight() const { return flight_.get(); }
  /// Fails the world unless it has failed already: because a rank says so, or with an error.
  void abort(std::string message);
  void fail(std::string message);
  /// See ProcessGroup::abort().
  void abort_by(int world_rank, std::string_view reason) noexcept;
  /// abort() with what `message()` returns; with a few words where there is no memory for it.
  template <class F>
  void abort_with(F message) noexcept {
    abort(text_of(message));
  }
  std::chrono::milliseconds deadline() const { return deadline_; }
  /// Time as it counts against the deadline: see [Note: time that counts].
  DeadlineClock& clock() { return *clock_; }
  /// When something that begins now must be done.
  DeadlineClock::time_point time_limit() { return clock_->now() + deadline_; }
  /// See ProcessGroup::pause_deadline().
  std::shared_ptr<const void> pause_deadline() { return DeadlineClock::pause(clock_); }
  /// Returns once `word` is not `value` (true), or after the deadline (false).
  bool wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value);
  bool has_failed() { return failed_.load(std::memory_order_acquire); }
  /// Throws CommError if the world has failed.
  void check();
  /// Whether `message` is what abort() made every rank throw.
  bool is_echo(std::string_view message);

 private:
  friend class Rendezvous;
  template <class F>
  static std::string text_of(F message) noexcept {
    try {
      return message();
    } catch (const std::bad_alloc&) {
      return "no memory left";  // short enough to need none
    }
  }
  void fail_locked(std::string message, bool aborted = false);  // under mutex_

  const std::chrono::milliseconds deadline_;
  const std::function<void(const std::string& message)> on_failure_;
  const std::shared_ptr<FlightRecorder> flight_;
  const std::shared_ptr<DeadlineClock> clock_ = std::make_shared<DeadlineClock>();
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;  // guards the rest, and all groups; never held while working or sleeping
  std::optional<std::string> failure_;
  bool aborted_ = false;  // failure_ came from abort()
  std::vector<Rendezvous*> groups_;
};

/// What a rank calls. Equal on all ranks, or the world fails.
struct Call {
  std::int64_t sequence = 0;
  std::string_view op;  ///< static storage
  std::string text;     ///< everything that must agree: op, reduction, dtypes, count, root, label
  FlightTicket flight = {};
};

/// What a rank brings to a meeting; the op says what it points to.
struct Slot {
  const void* in = nullptr;
  void* out = nullptr;
};

/// The work of a meeting: `num_per_block` chunks for each rank's block, done in any order by any
/// rank, each once. If one throws, the others still run; then the world fails with the error and
/// the rank whose block it was, and whoever ran it gets the error itself.
struct Chunks {
  std::int64_t num_per_block = 0;
  bool wake = true;    ///< false: too little work to wake sleepers for, the last to come does it
  bool shared = true;  ///< false: each rank does its own block, and waits for the others' at most
                       ///< the deadline
  std::function<void(std::span<const Slot> slots, int block, std::int64_t chunk)> run = {};
};

/// The meetings of one group.
class Rendezvous {
 public:
  /// The op of an announced call that nothing waits for.
  static constexpr std::string_view kDeclare = "declare";

  /// `members`: the group's ranks as ranks of the world. `name` is for messages.
  Rendezvous(std::shared_ptr<World> world, std::string name, std::vector<int> members);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  const std::string& name() const { return name_; }
  const std::shared_ptr<World>& world() const { return world_; }
  /// A call of rank `rank`, recorded if its world is.
  FlightTicket record(int rank, std::int64_t sequence, const FlightCall& call) const;

  /// Returns when every rank has come and all chunks are done. Throws CommError otherwise.
  void meet(int rank, const Call& call, const Slot& slot, const Chunks& chunks);
  /// Compares `call` with what the others called, without waiting for them. Throws CommError if
  /// they differ, or have left.
  void announce(int rank, const Call& call);
  /// Fails the world because `call`, which was announced, did not end in time: names who is
  /// missing.
  void expire(const Call& call);
  /// `rank` will come to no meeting from number `sequence` on; whoever waits there for it fails.
  void depart(int rank, std::int64_t sequence) noexcept;

 private:
  friend class World;
  struct Meeting;

  void meet_and_work(int rank, const Call& call, const Slot& slot, const Chunks& chunks);
  std::shared_ptr<Meeting> arrive(int rank, const Call& call, const Slot& slot,
                                  const Chunks& chunks);
  void await(Meeting& meeting);
  void fail_late(const Call& call, const Meeting* meeting);  // under the world's mutex
  void fail_chunk(const Call& call, int block) noexcept;
  std::string where(const Call& call) const;
  std::string absent(const Meeting& meeting, bool only_departed) const;
  std::string elsewhere(int world_rank) const;
  void fail_if_departed(const Meeting& meeting) noexcept;

  const std::shared_ptr<World> world_;
  const std::string name_;
  const std::vector<int> members_;
  int flight_group_ = 0;
  std::vector<FlightRing*> flight_rings_;  // by rank; none if nothing is recorded
  std::map<std::int64_t, std::shared_ptr<Meeting>> meetings_;  // not ready yet
  std::vector<std::int64_t> departed_;                         // by rank: no meetings from here on
  std::vector<std::string> last_;                              // by rank: the last call it came to
};

}  // namespace tessera::comm

// One group's communicators in this process, and the thread that watches them. Private to comm;
// only where CUDA is built.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/communicator.h"
#include "engine/stream.h"

namespace tessera::comm {

/// One rank's place in a group: its communicators, and what it has enqueued on them.
class NcclSeat {
 public:
  /// `group`: of thread ranks, null between processes. `name`: "rank 2 of world".
  NcclSeat(std::shared_ptr<World> world, std::shared_ptr<Rendezvous> group, std::string name,
           int num_ranks, NcclPair communicators);

  NcclCommunicator& communicator(Purpose purpose) {
    return *communicators_[static_cast<std::size_t>(purpose)];
  }
  World& world() { return *world_; }

  /// From now on `call`, which lies between the two events of `stream`, is watched: it may take the
  /// deadline, counted from when the stream comes to it.
  void watch(const engine::Stream& stream, Call call, engine::Event begin, engine::Event end);
  /// Fails the world if a communicator has failed or a call takes too long. Never throws or blocks.
  void poll() noexcept;
  /// See [Note: aborting together].
  void abort() noexcept;
  const NcclLibrary& library() const { return communicators_[0]->library(); }

 private:
  struct Pending {
    Call call;
    engine::Event begin, end;
    std::optional<DeadlineClock::time_point> started = std::nullopt;
  };

  void poll_pending();

  const std::shared_ptr<World> world_;
  const std::shared_ptr<Rendezvous> group_;
  const std::string name_;
  const int num_ranks_;
  const NcclPair communicators_;
  std::mutex mutex_;                                    // guards the rest
  std::map<const void*, std::deque<Pending>> pending_;  // by stream
  std::string last_ = "nothing";
};

/// Polls all seats of a world's ranks in this process. When the world fails it aborts their
/// communicators, so that no stream and nobody who waits for one is left hanging.
class NcclWatch {
 public:
  explicit NcclWatch(std::shared_ptr<World> world);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  void add(NcclSeat* seat);
  void remove(NcclSeat* seat);
  /// To be called when the world has failed: now rather than at the next poll.
  void abort_all() noexcept;

 private:
  void run();

  const std::shared_ptr<World> world_;
  std::mutex mutex_;  // guards seats_
  std::vector<NcclSeat*> seats_;
  std::atomic<std::uint32_t> closing_ = 0;
  std::thread thread_;
};

/// The seats of one group that this process holds. The last rank to leave ends all of them: so no
/// rank waits in a destructor for what another thread does next.
class NcclClique {
 public:
  NcclClique(std::shared_ptr<NcclWatch> watch, std::vector<std::unique_ptr<NcclSeat>> seats);
  /// Waits for what is enqueued, at most the deadline; a failed world, or one that an exception
  /// unwinds, aborts.
  ~NcclClique();
  NcclClique(const NcclClique&) = delete;
  NcclClique& operator=(const NcclClique&) = delete;

  NcclSeat& seat(std::size_t i) { return *seats_[i]; }
  const std::shared_ptr<NcclWatch>& watch() const { return watch_; }

 private:
  bool finish() noexcept;  // whether all of them have ended in order

  const std::shared_ptr<NcclWatch> watch_;
  const std::vector<std::unique_ptr<NcclSeat>> seats_;
  const int num_exceptions_ = std::uncaught_exceptions();
};

}  // namespace tessera::comm

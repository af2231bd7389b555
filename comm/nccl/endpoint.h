// One rank's end of a group over NCCL. Private to comm; only where CUDA is built.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/nccl/communicator.h"
#include "comm/world/call.h"
#include "comm/world/world.h"
#include "engine/stream.h"

namespace tessera::comm {

/// One rank's end of a group: its communicators, and what it has enqueued on them.
class NcclEndpoint {
 public:
  /// Looks after a call that a stream is in, at each poll: fails the world if it cannot end, or
  /// `is_late`, which is after the deadline. By whoever polls, under mutex_.
  using LookAfter = std::function<void(const Call& call, bool is_late)>;

  /// `name`: "rank 2 of world".
  NcclEndpoint(std::shared_ptr<World> world, LookAfter look_after, std::string name,
               NcclCommunicators communicators);

  NcclCommunicator& communicator(Purpose purpose) {
    return *communicators_[static_cast<std::size_t>(purpose)];
  }
  World& world() { return *world_; }

  /// From now on `call`, which lies between the two events of `stream`, is watched: it may take the
  /// deadline, counted from when the stream comes to it.
  void watch(const engine::Stream& stream, Call call, engine::Event begin, engine::Event end);
  /// Fails the world if a communicator has failed or a call cannot end. Never throws. Blocks for as
  /// long as World::wait_for_word() where it fails it.
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
  const LookAfter look_after_;
  const std::string name_;
  const NcclCommunicators communicators_;
  std::mutex mutex_;                                    // guards the rest
  std::map<const void*, std::deque<Pending>> pending_;  // by stream
  std::string last_ = "nothing";
};

}  // namespace tessera::comm

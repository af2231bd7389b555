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
  /// Fails the world because a call took too long: by the thread that polls, under mutex_.
  using Expire = std::function<void(const Call& call)>;

  /// `name`: "rank 2 of world".
  NcclEndpoint(std::shared_ptr<World> world, Expire expire, std::string name,
               NcclCommunicators communicators);

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
  const Expire expire_;
  const std::string name_;
  const NcclCommunicators communicators_;
  std::mutex mutex_;                                    // guards the rest
  std::map<const void*, std::deque<Pending>> pending_;  // by stream
  std::string last_ = "nothing";
};

}  // namespace tessera::comm

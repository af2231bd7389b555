#include "comm/nccl/endpoint.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

namespace tessera::comm {

NcclEndpoint::NcclEndpoint(std::shared_ptr<World> world, LookAfter look_after, std::string name,
                           NcclCommunicators communicators)
    : world_(std::move(world)),
      look_after_(std::move(look_after)),
      name_(std::move(name)),
      communicators_(std::move(communicators)) {}

void NcclEndpoint::watch(const engine::Stream& stream, Call call, engine::Event begin,
                         engine::Event end) {
  const std::lock_guard lock(mutex_);
  last_ = fmt::format("#{} {}", call.sequence, call.text);
  pending_[stream.native()].push_back(
      {.call = std::move(call), .begin = std::move(begin), .end = std::move(end)});
}

void NcclEndpoint::poll() noexcept {
  try {
    for (const auto& communicator : communicators_) {
      if (const auto error = communicator->error()) {
        world_->wait_for_word([this] { poll_pending(); });
        const std::lock_guard lock(mutex_);
        world_->fail(
            fmt::format("[nccl] {} failed: {}; its last call was {}", name_, *error, last_));
        return;
      }
    }
    poll_pending();
  } catch (const std::exception& error) {
    // Its rank is told of the same by what it waits for, and that is the cause.
    world_->abort_with([&] { return fmt::format("[nccl] {} failed: {}", name_, error.what()); });
  }
}

void NcclEndpoint::poll_pending() {
  const std::lock_guard lock(mutex_);
  const auto now = world_->clock().now();
  for (auto& [stream, calls] : pending_) {
    while (!calls.empty() && calls.front().end.reached()) {
      calls.front().call.flight.enter(FlightState::kFinished);
      calls.pop_front();
    }
    if (calls.empty()) continue;
    Pending& first = calls.front();
    if (!first.started && first.begin.reached()) {
      first.started = now;
      first.call.flight.enter(FlightState::kStarted);
    }
    if (first.started) look_after_(first.call, now - *first.started >= world_->deadline());
  }
}

void NcclEndpoint::abort() noexcept {
  for (const auto& communicator : communicators_) communicator->abort();
}

}  // namespace tessera::comm

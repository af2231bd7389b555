#include "comm/nccl/watchdog.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "comm/world/futex.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kPoll(5);

}  // namespace

NcclWatchdog::NcclWatchdog(std::shared_ptr<World> world) : world_(std::move(world)) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    engine::fail<engine::DeviceError>("[nccl] expected to start a thread, got {}", error.what());
  }
}

NcclWatchdog::~NcclWatchdog() {
  closing_ = 1;
  wake_all(closing_);
  thread_.join();
}

void NcclWatchdog::add(NcclEndpoint* endpoint) {
  const std::lock_guard lock(mutex_);
  endpoints_.push_back(endpoint);
}

void NcclWatchdog::remove(NcclEndpoint* endpoint) {
  const std::lock_guard lock(mutex_);
  std::erase(endpoints_, endpoint);
}

void NcclWatchdog::abort_all() noexcept {
  const std::lock_guard lock(mutex_);
  if (endpoints_.empty()) return;
  const AbortTogether together(endpoints_[0]->library());
  for (NcclEndpoint* endpoint : endpoints_) endpoint->abort();
}

void NcclWatchdog::run() {
  const auto poll = std::min<std::chrono::milliseconds>(kPoll, world_->deadline() / 4);
  while (!wait_while(closing_, 0, Clock::now() + poll)) {
    if (!world_->has_failed()) {
      const std::lock_guard lock(mutex_);
      for (NcclEndpoint* endpoint : endpoints_) endpoint->poll();
    }
    if (world_->has_failed()) abort_all();
  }
}

NcclEndpoints::NcclEndpoints(std::shared_ptr<NcclWatchdog> watchdog,
                             std::vector<std::unique_ptr<NcclEndpoint>> endpoints)
    : watchdog_(std::move(watchdog)), endpoints_(std::move(endpoints)) {
  for (const auto& endpoint : endpoints_) watchdog_->add(endpoint.get());
}

NcclEndpoints::~NcclEndpoints() {
  for (const auto& endpoint : endpoints_) watchdog_->remove(endpoint.get());
  if (endpoints_.empty() || finish()) return;
  const AbortTogether together(endpoints_[0]->library());
  for (const auto& endpoint : endpoints_) endpoint->abort();
}

bool NcclEndpoints::finish() noexcept {
  World& world = endpoints_[0]->world();
  if (world.has_failed() || std::uncaught_exceptions() != num_exceptions_) return false;
  const auto deadline = world.time_limit();
  for (const Purpose purpose : {Purpose::kGather, Purpose::kReduce}) {
    for (const auto& endpoint : endpoints_) endpoint->communicator(purpose).begin_finish();
    for (const auto& endpoint : endpoints_) {
      if (!endpoint->communicator(purpose).end_finish(world, deadline)) return false;
    }
  }
  return true;
}

}  // namespace tessera::comm

#include "comm/nccl/watchdog.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "engine/error.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kPoll(5);

}  // namespace

NcclSeat::NcclSeat(std::shared_ptr<World> world, std::shared_ptr<Rendezvous> group,
                   std::string name, int num_ranks, NcclPair communicators)
    : world_(std::move(world)),
      group_(std::move(group)),
      name_(std::move(name)),
      num_ranks_(num_ranks),
      communicators_(std::move(communicators)) {}

void NcclSeat::watch(const engine::Stream& stream, Call call, engine::Event begin,
                     engine::Event end) {
  const std::lock_guard lock(mutex_);
  last_ = fmt::format("#{} {}", call.sequence, call.text);
  pending_[stream.native()].push_back(
      {.call = std::move(call), .begin = std::move(begin), .end = std::move(end)});
}

void NcclSeat::poll() noexcept {
  try {
    for (const auto& communicator : communicators_) {
      if (const auto error = communicator->error()) {
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

void NcclSeat::poll_pending() {
  const std::lock_guard lock(mutex_);
  const auto now = world_->clock().now();
  for (auto& [stream, calls] : pending_) {
    while (!calls.empty() && calls.front().end.reached()) calls.pop_front();
    if (calls.empty()) continue;
    Pending& first = calls.front();
    if (!first.started && first.begin.reached()) first.started = now;
    if (!first.started || now - *first.started < world_->deadline()) continue;
    if (group_) return group_->expire(first.call);
    return world_->fail(fmt::format(
        "[{} #{}] expected {} ranks within {} ms, got no end of it: some rank is missing; "
        "{} ({})",
        first.call.op, first.call.sequence, num_ranks_, world_->deadline().count(), first.call.text,
        name_));
  }
}

void NcclSeat::abort() noexcept {
  for (const auto& communicator : communicators_) communicator->abort();
}

NcclWatch::NcclWatch(std::shared_ptr<World> world) : world_(std::move(world)) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    engine::fail<engine::DeviceError>("[nccl] expected to start a thread, got {}", error.what());
  }
}

NcclWatch::~NcclWatch() {
  closing_ = 1;
  wake_all(closing_);
  thread_.join();
}

void NcclWatch::add(NcclSeat* seat) {
  const std::lock_guard lock(mutex_);
  seats_.push_back(seat);
}

void NcclWatch::remove(NcclSeat* seat) {
  const std::lock_guard lock(mutex_);
  std::erase(seats_, seat);
}

void NcclWatch::abort_all() noexcept {
  const std::lock_guard lock(mutex_);
  if (seats_.empty()) return;
  const AbortTogether together(seats_[0]->library());
  for (NcclSeat* seat : seats_) seat->abort();
}

void NcclWatch::run() {
  const auto poll = std::min<std::chrono::milliseconds>(kPoll, world_->deadline() / 4);
  while (!wait_while(closing_, 0, Clock::now() + poll)) {
    if (!world_->has_failed()) {
      const std::lock_guard lock(mutex_);
      for (NcclSeat* seat : seats_) seat->poll();
    }
    if (world_->has_failed()) abort_all();
  }
}

NcclClique::NcclClique(std::shared_ptr<NcclWatch> watch,
                       std::vector<std::unique_ptr<NcclSeat>> seats)
    : watch_(std::move(watch)), seats_(std::move(seats)) {
  for (const auto& seat : seats_) watch_->add(seat.get());
}

NcclClique::~NcclClique() {
  for (const auto& seat : seats_) watch_->remove(seat.get());
  if (seats_.empty() || finish()) return;
  const AbortTogether together(seats_[0]->library());
  for (const auto& seat : seats_) seat->abort();
}

bool NcclClique::finish() noexcept {
  World& world = seats_[0]->world();
  if (world.has_failed() || std::uncaught_exceptions() != num_exceptions_) return false;
  const auto deadline = world.time_limit();
  for (const Purpose purpose : {Purpose::kGather, Purpose::kReduce}) {
    for (const auto& seat : seats_) seat->communicator(purpose).begin_finish();
    for (const auto& seat : seats_) {
      if (!seat->communicator(purpose).end_finish(world, deadline)) return false;
    }
  }
  return true;
}

}  // namespace tessera::comm

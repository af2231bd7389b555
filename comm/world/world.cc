#include "comm/world/world.h"

#include <fmt/core.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/world/futex.h"
#include "engine/error.h"

namespace tessera::comm {

using engine::CommError;

World::World(std::chrono::milliseconds deadline,
             std::function<void(const std::string& message)> on_failure,
             std::shared_ptr<FlightRecorder> flight, std::chrono::milliseconds patience)
    : deadline_(std::min<std::chrono::milliseconds>(deadline, std::chrono::years(100))),
      on_failure_(std::move(on_failure)),
      flight_(std::move(flight)),
      patience_(std::min(patience, deadline)) {
  engine::require(deadline.count() > 0, "[world] expected a deadline > 0 ms, got {}",
                  deadline.count());
}

void World::fail_locked(std::string message, bool aborted) {
  if (failure_) return;
  failure_ = std::move(message);
  aborted_ = aborted;
  failed_.store(true, std::memory_order_release);
  if (flight_) flight_->fail();
  if (on_failure_) on_failure_(*failure_);
  for (Group* group : groups_) group->world_failed();
}

void World::abort(std::string message) {
  const auto locked = lock();
  fail_locked(std::move(message), true);
}

void World::abort_by(int world_rank, std::string_view reason) noexcept {
  abort_with([&] { return fmt::format("[abort] by rank {}: {}", world_rank, reason); });
}

void World::fail(std::string message) {
  const auto locked = lock();
  fail_locked(std::move(message));
}

void World::check() {
  const auto locked = lock();
  if (failure_) throw CommError(*failure_);
}

void World::wait_for_word(const std::function<void()>& look) {
  constexpr std::chrono::milliseconds kSleep(10);
  for (std::chrono::milliseconds slept{0}; slept < patience_ && !has_failed(); slept += kSleep) {
    if (look) look();
    std::this_thread::sleep_for(kSleep);
  }
}

bool World::wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const auto limit = time_limit();
  for (;;) {
    const auto left =
        std::min<DeadlineClock::duration>(limit - clock_->now(), DeadlineClock::kTick);
    if (comm::wait_while(word, value, Clock::now() + left)) return true;
    if (clock_->now() >= limit) return false;
  }
}

bool World::is_echo(std::string_view message) {
  const auto locked = lock();
  return aborted_ && message == *failure_;
}

std::string World::wait_elsewhere(const Group* here, int world_rank) const {
  for (const Group* group : groups_) {
    if (group == here) continue;
    std::string wait = group->wait_of(world_rank);
    if (!wait.empty()) return wait;
  }
  return {};
}

}  // namespace tessera::comm

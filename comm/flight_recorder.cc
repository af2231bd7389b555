#include "comm/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace tessera::comm {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::int64_t FlightRing::called(int group, std::int64_t sequence, const FlightCall& call) noexcept {
  const std::int64_t now = now_ns();
  const std::size_t label_nbytes = std::min(call.label.size(), kMaxLabel);
  const std::lock_guard lock(mutex_);
  const std::int64_t number = num_calls_++;
  Slot& slot = slots_[static_cast<std::size_t>(number) % kNumEntries];
  slot.call = call;
  slot.call.label = {};
  std::copy_n(call.label.data(), label_nbytes, slot.label.data());
  slot.label_nbytes = static_cast<std::uint8_t>(label_nbytes);
  slot.state = FlightState::kCalled;
  slot.group = group;
  slot.sequence = sequence;
  slot.called_ns = now;
  slot.started_ns = slot.ended_ns = 0;
  return number;
}

void FlightRing::enter(std::int64_t number, FlightState state) noexcept {
  const std::int64_t now = now_ns();
  const std::lock_guard lock(mutex_);
  if (num_calls_ - number > static_cast<std::int64_t>(kNumEntries)) return;
  Slot& slot = slots_[static_cast<std::size_t>(number) % kNumEntries];
  slot.state = state;
  (state == FlightState::kStarted ? slot.started_ns : slot.ended_ns) = now;
}

RankFlight FlightRing::read(int rank) const {
  RankFlight flight{.rank = rank, .num_calls = 0, .entries = {}};
  flight.entries.reserve(kNumEntries);  // while no rank waits for the lock
  const std::lock_guard lock(mutex_);
  flight.num_calls = num_calls_;
  const std::int64_t num_kept = std::min(num_calls_, static_cast<std::int64_t>(kNumEntries));
  for (std::int64_t number = num_calls_ - num_kept; number < num_calls_; ++number) {
    const Slot& slot = slots_[static_cast<std::size_t>(number) % kNumEntries];
    flight.entries.push_back({.group = slot.group,
                              .sequence = slot.sequence,
                              .op = std::string(slot.call.op),
                              .dtype = std::string(slot.call.dtype),
                              .label = std::string(slot.label.data(), slot.label_nbytes),
                              .numel = slot.call.numel,
                              .onto_sum = slot.call.onto_sum,
                              .root = slot.call.root,
                              .state = slot.state,
                              .called_ns = slot.called_ns,
                              .started_ns = slot.started_ns,
                              .ended_ns = slot.ended_ns});
  }
  return flight;
}

FlightRecording FlightRecorder::read() const {
  const std::lock_guard lock(mutex_);
  FlightRecording recording{
      .now_ns = now_ns(), .failed_ns = failed_ns_, .groups = groups_, .ranks = {}};
  for (const auto& [rank, ring] : rings_) recording.ranks.push_back(ring->read(rank));
  return recording;
}

FlightRing& FlightRecorder::ring(int rank) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<FlightRing>& ring = rings_[rank];
  if (!ring) ring = std::make_unique<FlightRing>();
  return *ring;
}

int FlightRecorder::add_group(std::string name, std::vector<int> members) {
  const std::lock_guard lock(mutex_);
  return add_group_locked(std::move(name), std::move(members));
}

int FlightRecorder::add_group_locked(std::string name, std::vector<int> members) {
  const auto size = static_cast<std::size_t>(*std::ranges::max_element(members)) + 1;
  if (waits_.by_rank.size() < size) waits_.by_rank.resize(size);
  groups_.push_back({std::move(name), std::move(members)});
  return static_cast<int>(groups_.size()) - 1;
}

int FlightRecorder::only_group(const std::string& name, const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(groups_, name, &FlightGroup::name);
  if (found != groups_.end()) return static_cast<int>(found - groups_.begin());
  return add_group_locked(name, members);
}

FlightWaits FlightRecorder::waits() const {
  const std::lock_guard lock(mutex_);
  return waits_;
}

void FlightRecorder::met(int rank, std::int64_t waited_ns) noexcept {
  const std::lock_guard lock(mutex_);
  ++waits_.num_calls;
  if (rank < 0) return;
  FlightWaits::Wait& wait = waits_.by_rank[static_cast<std::size_t>(rank)];
  ++wait.num_calls;
  wait.waited_ns += waited_ns;
}

void FlightRecorder::fail() noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_ns_ == 0) failed_ns_ = now_ns();
}

}  // namespace tessera::comm

#include "shard/replays.h"

#include <algorithm>
#include <utility>

namespace tessera::shard {

using engine::Block;
using engine::Pass;

Replays::Visits& Replays::around() {
  if (!forward_.empty()) return forward_.back().again;
  return backward_.empty() ? outside_ : backward_.back();
}

bool Replays::before_forward(const Block& block, const Unit& unit, Pass pass) {
  // A forward inside a backward is that of a region that runs again.
  Visits& again = backward_.empty() ? outside_ : backward_.back();
  const auto it = std::ranges::find(again, &unit);
  const bool was_to_come = it != again.end() && (!backward_.empty() || pass == Pass::kRecorded);
  if (was_to_come) {
    again.erase(it);
    --num_visits_[&unit];
  }
  if (pass == Pass::kRecorded) {
    forward_.push_back({&block});
  } else if (pass == Pass::kDeferred || &around() != &outside_) {
    around().push_back(&unit);
    ++num_visits_[&unit];
  }
  return was_to_come;
}

void Replays::after_forward(const Block& block, Pass pass) {
  if (pass != Pass::kRecorded || forward_.empty() || forward_.back().block != &block) return;
  ended_[&block].push_back(std::move(forward_.back().again));
  forward_.pop_back();
}

void Replays::before_backward(const Block& block) {
  std::vector<Visits>& ended = ended_[&block];
  backward_.emplace_back();
  if (ended.empty()) return;
  backward_.back() = std::move(ended.back());
  ended.pop_back();
}

// A region that no gradient reached has not run again.
void Replays::after_backward() {
  if (backward_.empty()) return;
  for (const Unit* unit : backward_.back()) --num_visits_[unit];
  backward_.pop_back();
}

bool Replays::has(const Unit& unit) const {
  const auto it = num_visits_.find(&unit);
  return it != num_visits_.end() && it->second > 0;
}

void Replays::clear() {
  forward_.clear();
  ended_.clear();
  backward_.clear();
  outside_.clear();
  num_visits_.clear();
}

}  // namespace tessera::shard

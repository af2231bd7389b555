#include "shard/schedule.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "shard/unit.h"

namespace tessera::shard {

void Schedule::declare(std::vector<Unit*> order) { order_ = std::move(order); }

void Schedule::begin_micro_step() {
  log_.clear();
  position_ = 0;
  pending_ = nullptr;
  in_backward_ = false;
}

void Schedule::close_pending(const Unit& entering, const engine::Stream& compute) {
  if (pending_ != nullptr && pending_ != &entering) pending_->close_visit(compute);
  pending_ = nullptr;
}

void Schedule::enter_forward(Unit& unit, const engine::Stream& compute) {
  close_pending(unit, compute);
  in_backward_ = false;
  unit.unshard(compute, "forward");
  unit.wait_for_unshard(compute);
  if (unit.is_root()) {
    position_ = 0;
  } else {
    pending_ = &unit;
    // A visit out of plan moves the plan to the next place where this unit stands, if any.
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const std::size_t at = (position_ + i) % order_.size();
      if (order_[at] != &unit) continue;
      position_ = at + 1;
      break;
    }
  }
  for (int i = 0; i < depth_ && position_ + std::size_t(i) < order_.size(); ++i) {
    Unit& next = *order_[position_ + std::size_t(i)];
    if (!next.unsharded() && next.can_prefetch()) next.unshard(compute, "forward");
  }
}

bool Schedule::leave_forward(Unit& unit, bool will_backward) {
  if (!will_backward) return false;
  log_.push_back(&unit);
  return unit.is_root() || position_ == order_.size();
}

void Schedule::enter_backward(Unit& unit, const engine::Stream& compute) {
  close_pending(unit, compute);
  if (!in_backward_) {
    in_backward_ = true;
    std::vector<Unit*> recorded;
    std::copy_if(log_.begin(), log_.end(), std::back_inserter(recorded),
                 [](const Unit* u) { return !u->is_root(); });
    if (!recorded.empty()) order_ = std::move(recorded);
    position_ = 0;
  }
  const auto it = std::find(log_.rbegin(), log_.rend(), &unit);
  if (it != log_.rend()) log_.erase(std::next(it).base());
  unit.unshard(compute, "backward");
  unit.wait_for_unshard(compute);
  int ahead = 0;
  for (auto next = log_.rbegin(); next != log_.rend() && ahead < depth_; ++next) {
    if ((*next)->is_root()) continue;
    if (!(*next)->unsharded() && (*next)->can_prefetch()) (*next)->unshard(compute, "backward");
    ++ahead;
  }
}

}  // namespace tessera::shard

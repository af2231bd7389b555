#include "shard/schedule.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {

using engine::Block;
using engine::Pass;
using engine::require;
using engine::Stream;
using engine::Tape;

Schedule::~Schedule() {
  for (const Visitor& v : visitors_) {
    for (Block* block : v.unit->blocks()) block->hooks = nullptr;
  }
}

void Schedule::add(Unit& unit) {
  visitors_.push_back({.unit = &unit});
  for (std::size_t i = 0; i < unit.blocks().size(); ++i) {
    unit.blocks()[i]->hooks = this;
    positions_[unit.blocks()[i]] = {&visitors_.back(), i};
  }
  if (!unit.is_root()) order_.push_back(&visitors_.back());
  reduce_order_.insert(unit.is_root() ? reduce_order_.end() : reduce_order_.begin(),
                       &visitors_.back());
}

const Schedule::Position& Schedule::position_of(const Block& block) const {
  const auto it = positions_.find(&block);
  require(it != positions_.end(), "[fsdp] expected a wrapped block, got '{}'", block.name);
  return it->second;
}

// The micro-step
// -----------------------------------------------------------------------------------

void Schedule::forget() {
  for (Visitor& v : visitors_) {
    v = {.unit = v.unit, .has_stray = v.has_stray};
    v.unit->release();
  }
  planned_ = {0, order_.size()};
  forward_.clear();
  pending_.clear();
  last_entered_ = nullptr;
  in_backward_ = is_counted_ = false;
  num_open_backwards_ = 0;
  in_micro_step_ = false;
  is_shadow_ = false;
  untold_.clear();
  replays_.clear();
  calls_.clear();
}

void Schedule::close_visits(const Stream& compute) {
  for (Visitor& v : visitors_) close_visit(v, compute);
}

void Schedule::renew_stale(const Stream& compute) {
  if (!std::exchange(has_stale_, false)) return;
  for (const Visitor& v : visitors_) v.unit->renew_stale(compute);
  gather_kept(compute);
}

void Schedule::keep_gathered(const Stream& compute) {
  keeps_ = true;
  for (const Visitor& v : visitors_) v.unit->set_kept(true);
  gather_kept(compute);
}

void Schedule::gather_kept(const Stream& compute) {
  if (!keeps_) return;
  for (auto v = reduce_order_.rbegin(); v != reduce_order_.rend(); ++v) {
    (*v)->unit->unshard(compute, "keep_gathered");
  }
}

void Schedule::let_go(const Stream& compute) {
  keeps_ = false;
  for (const Visitor& v : visitors_) v.unit->set_kept(false);
  cancel(compute);
}

void Schedule::cancel(const Stream& compute) {
  forget();
  for (const Visitor& v : visitors_) v.unit->reshard(compute);
}

void Schedule::begin_micro_step(const MicroStep& options, bool is_last) {
  forget();  // what was recorded outside of a micro-step
  micro_step_ = options;
  is_last_ = is_last;
  num_backwards_ = 0;
  in_micro_step_ = true;
  has_recorded_ = false;
}

void Schedule::end_micro_step(const Stream& compute) {
  for (Visitor& v : visitors_) {
    require(v.recorded.empty(),
            "[fsdp] expected a backward for every recorded forward of the step, got {} without "
            "('{}'): run evaluations inside tape.no_grad()",
            v.recorded.size(), v.unit->name());
  }
  if (!micro_step_.no_sync) {
    for (Visitor* v : reduce_order_) v->end_gradient();
    reduce_final(compute);
  }
  if (num_backwards_ > 0 && !is_shadow_) last_calls_.swap(calls_);
  forget();
}

namespace {

// Of trainable parameters.
bool has_pending_uses(const Unit& unit, const Tape& tape) {
  return unit.trainable() != nullptr &&
         std::ranges::any_of(unit.trainable()->parameters,
                             [&](const engine::Parameter* p) { return tape.pending_uses(*p) > 0; });
}

}  // namespace

// Hooks
// --------------------------------------------------------------------------------------------

void Schedule::before_forward(const Block& block, const Tape& tape) {
  require(!keeps_ || tape.pass() == Pass::kUnrecorded,
          "[fsdp] expected forwards inside tape.no_grad() in keep_gathered(), got one that is "
          "recorded ('{}')",
          block.name);
  refuse_stray_forward(tape);
  renew_stale(tape.stream());
  if (!in_micro_step_ && tape.pass() == Pass::kRecorded && !tape.is_frozen()) {
    position_of(block).visitor->has_stray = true;
  }
  call({.hook = Call::Hook::kBeforeForward,
        .block = &block,
        .pass = tape.pass(),
        .is_frozen = tape.is_frozen()},
       tape.stream());
}

// The tape's backward would come to it and find no step that it is part of.
void Schedule::refuse_stray_forward(const Tape& tape) {
  if (!in_micro_step_ || tape.pass() != Pass::kRecorded || std::exchange(has_recorded_, true)) {
    return;
  }
  for (Visitor& v : visitors_) {
    require(!std::exchange(v.has_stray, false) || !has_pending_uses(*v.unit, tape),
            "[fsdp] expected no recorded forward from before this step, got one of '{}' that never "
            "ran backward: wrap evaluations in tape.no_grad(), or forget them with tape.clear()",
            v.unit->name());
  }
}

void Schedule::after_forward(const Block& block, const Tape& tape, bool has_ops) {
  call(
      {.hook = Call::Hook::kAfterForward, .block = &block, .pass = tape.pass(), .has_ops = has_ops},
      tape.stream());
}

void Schedule::before_backward(const Block& block, const Tape& tape) {
  const Visitor* visitor = position_of(block).visitor;
  call({Call::Hook::kBeforeBackward, &block, tape.pass(),
        visitor->is_reduced() && has_pending_uses(*visitor->unit, tape)},
       tape.stream());
}

void Schedule::after_backward(const Block& block, const Tape& tape) {
  const Visitor* visitor = position_of(block).visitor;
  const bool ends_visit = visitor->backward && visitor->backward->num_regions == 1;
  call({Call::Hook::kAfterBackward, &block, tape.pass(),
        ends_visit && has_pending_uses(*visitor->unit, tape)},
       tape.stream());
  const Visitor& root = visitors_.back();
  if (!root.unit->is_root() || &root == visitor || !root.backward || root.is_final()) return;
  if (has_pending_uses(*root.unit, tape)) return;
  call({Call::Hook::kLastUse, root.unit->blocks().front(), tape.pass()}, tape.stream());
}

void Schedule::call(const Call& call, const Stream& compute) {
  require(!is_shadow_,
          "[fsdp] expected neither forward nor backward in a micro-step for which join() was told "
          "that this rank has no batch ('{}')",
          call.block->name);
  if (in_micro_step_) calls_.push_back(call);
  run(call, compute);
}

void Schedule::run(const Call& call, const Stream& compute) {
  const Position& at = position_of(*call.block);
  switch (call.hook) {
    case Call::Hook::kBeforeForward:
      return begin_forward(at, compute, call);
    case Call::Hook::kAfterForward:
      replays_.after_forward(*call.block, call.pass);
      return end_forward(at, compute, call.has_ops);
    case Call::Hook::kBeforeBackward:
      replays_.before_backward(*call.block);
      return begin_backward(at, compute, call.has_pending_uses);
    case Call::Hook::kAfterBackward:
      replays_.after_backward();
      end_backward(at, compute, call.has_pending_uses);
      return tell_final(compute);
    case Call::Hook::kLastUse:
      if (completes_gradient(*at.visitor, false)) end_gradient(*at.visitor, compute);
      return;
  }
}

void Schedule::shadow(const Stream& compute) {
  for (const Call& call : last_calls_) run(call, compute);
  is_shadow_ = true;
}

// Forward
// ------------------------------------------------------------------------------------------

void Schedule::begin_forward(const Position& at, const Stream& compute, const Call& call) {
  const auto& [visitor, index] = at;
  const Pass pass = call.pass;
  const bool is_replay = replays_.before_forward(*call.block, *visitor->unit, pass);
  if (joins_visit(at, call)) {
    close_pending(*visitor, compute);
    if (!visitor->unit->is_root()) last_entered_ = visitor;
  } else if (!visitor->backward) {
    close_visit(*visitor, compute);
    enter_forward(*visitor, compute, call, is_replay);
    visitor->visit = Visit{.last = index,
                           .pass = pass,
                           .inside = {forward_.size(), forward_.size()},
                           .is_replay = is_replay,
                           .is_idle = call.is_frozen || visitor->unit->trainable() == nullptr,
                           .is_frozen = call.is_frozen};
  }
  ++visitor->num_open_blocks;
  auto& visit = visitor->backward ? visitor->backward : visitor->visit;
  if (pass == Pass::kRecorded) ++visit->num_regions;
}

// Whether a region is part of the visit at work: the next block of a packed unit, or one inside
// another.
bool Schedule::joins_visit(const Position& at, const Call& call) {
  const auto& [visitor, index] = at;
  if (!visitor->visit) return false;
  Visit& visit = *visitor->visit;
  const bool is_next =
      index > visit.last && visit.pass == call.pass && visit.is_frozen == call.is_frozen;
  if (!is_next && visitor->num_open_blocks == 0) return false;
  visit.last = std::max(visit.last, index);
  return true;
}

void Schedule::end_forward(const Position& at, const Stream& compute, bool has_ops) {
  Visitor& visitor = *at.visitor;
  if (visitor.num_open_blocks > 0) --visitor.num_open_blocks;  // else the step was given up inside
  if (!visitor.visit) return;                                  // inside its own backward
  if (has_ops) visitor.visit->is_idle = false;
  if (visitor.visit->last + 1 == visitor.unit->blocks().size()) close_visit(visitor, compute);
}

void Schedule::close_pending(const Visitor& entering, const Stream& compute) {
  if (last_entered_ != nullptr && last_entered_ != &entering) close_visit(*last_entered_, compute);
  last_entered_ = nullptr;
}

void Schedule::enter_forward(Visitor& visitor, const Stream& compute, const Call& call,
                             bool is_replay) {
  const Pass pass = call.pass;
  close_pending(visitor, compute);
  // Without a root nothing need be open where a region of no unit is recomputed.
  if (!is_replaying() && !is_replay && std::exchange(in_backward_, false)) {
    is_counted_ = false;
    planned_ = {0, order_.size()};
    forward_.clear();
  }
  Unit& unit = *visitor.unit;
  if (pass != Pass::kUnrecorded && !call.is_frozen) visitor.is_visited = true;
  unit.unshard(compute, "forward");
  unit.acquire(compute, "forward");
  if (unit.is_root()) {
    planned_ = {0, order_.size()};
  } else {
    last_entered_ = &visitor;
    if (!is_replaying() && pass != Pass::kUnrecorded) forward_.push_back(&visitor);
    if (pass == Pass::kDeferred) mark_replay();
    // A visit out of plan moves the plan to the next place where this unit stands, if any.
    if (!is_replaying()) planned_.end = order_.size();
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const std::size_t at = (planned_.begin + i) % order_.size();
      if (order_[at] != &visitor) continue;
      planned_.begin = at + 1;
      break;
    }
  }
  for (int i = 0; i < depth_ && planned_.begin + std::size_t(i) < planned_.end; ++i) {
    prefetch(*order_[planned_.begin + std::size_t(i)], compute, "forward");
  }
}

// The innermost recorded visit is that of the region that is recomputed.
void Schedule::mark_replay() {
  Visit* innermost = nullptr;
  for (Visitor& v : visitors_) {
    if (!v.visit || v.num_open_blocks == 0 || v.visit->pass != Pass::kRecorded) continue;
    if (innermost == nullptr || v.visit->inside.begin >= innermost->inside.begin) {
      innermost = &*v.visit;
    }
  }
  if (innermost != nullptr) innermost->will_replay = true;
}

void Schedule::prefetch(Visitor& next, const Stream& compute, const char* why) const {
  if (!next.unit->unsharded() && next.unit->can_prefetch()) next.unit->unshard(compute, why);
}

void Schedule::prefetch_first(const Stream& compute) {
  renew_stale(compute);
  for (std::size_t i = 0; i < std::min(std::size_t(depth_), order_.size()); ++i) {
    prefetch(*order_[i], compute, "forward");
  }
}

void Schedule::close_visit(Visitor& visitor, const Stream& compute) {
  if (!visitor.visit || visitor.num_open_blocks > 0) return;
  Visit visit = *std::exchange(visitor.visit, std::nullopt);
  Unit& unit = *visitor.unit;
  unit.release();
  const bool is_recorded = visit.pass == Pass::kRecorded;
  const bool is_pending = is_recorded && !visit.is_idle;
  if (is_recorded) {
    visit.inside.end = forward_.size();
    visitor.recorded.push_back(visit);
  }
  if (is_pending) pending_.push_back(&visitor);
  // The last unit of the forward is the first of the backward.
  const bool is_next = is_pending && (unit.is_root() || planned_.begin == planned_.end);
  const bool stays =
      !placement_.reshard_after_forward && !std::ranges::all_of(visitor.recorded, &Visit::is_idle);
  if (!is_next && !stays && !keeps_) unit.reshard(compute, is_pending);
}

// Backward
// -----------------------------------------------------------------------------------------

void Schedule::begin_backward(const Position& at, const Stream& compute, bool has_pending_uses) {
  const auto& [visitor, index] = at;
  const std::string& name = visitor->unit->blocks()[index]->name;
  close_visit(*visitor, compute);
  if (visitor->backward) return;
  const bool is_frozen = !visitor->recorded.empty() && visitor->recorded.back().is_frozen;
  require(in_micro_step_ || is_frozen, "[fsdp] expected begin_step() before a backward ('{}')",
          name);
  require(!visitor->recorded.empty(),
          "[fsdp] expected a forward recorded in this step before a backward ('{}'): call "
          "begin_step() before the forward, and wrap evaluations in tape.no_grad()",
          name);
  require(!visitor->is_reduced() || is_frozen ||
              (visitor->recorded.back().is_replay && !has_pending_uses),
          "[fsdp] expected {} backward in this micro-step, got another one that reaches '{}', "
          "which is reduced already: say MicroStep::num_backwards",
          micro_step_.num_backwards, visitor->unit->name());
  visitor->backward = visitor->recorded.back();
  visitor->recorded.pop_back();
  enter_backward(*visitor, compute);
  ++num_open_backwards_;
  if (!visitor->is_reduced() && !is_frozen) visitor->unit->begin_gradient(compute);
}

// A backward counts once it comes to a visit that is not frozen.
void Schedule::begin_backwards(bool is_frozen) {
  if (!std::exchange(in_backward_, true) && !forward_.empty()) order_ = forward_;
  if (is_frozen || std::exchange(is_counted_, true)) return;
  ++num_backwards_;
  const bool is_last_backward = num_backwards_ >= micro_step_.num_backwards;
  for (Visitor& v : visitors_) {
    if (is_last_backward && !v.is_visited) v.end_gradient();
  }
}

void Schedule::enter_backward(Visitor& visitor, const Stream& compute) {
  close_pending(visitor, compute);
  begin_backwards(visitor.backward->is_frozen);
  if (visitor.backward->is_idle) return;
  // What a recomputed region will visit again.
  planned_ = {visitor.backward->inside.begin, visitor.backward->inside.end};
  const auto it = std::find(pending_.rbegin(), pending_.rend(), &visitor);
  if (it != pending_.rend()) pending_.erase(std::next(it).base());
  visitor.unit->unshard(compute, "backward");
  visitor.unit->acquire(compute, "backward");
  int ahead = 0;
  if (visitor.backward->will_replay) {
    for (std::size_t i = planned_.begin; i < planned_.end && ahead < depth_; ++i, ++ahead) {
      prefetch(*order_[i], compute, "forward");
    }
  }
  if (backward_ == BackwardPrefetch::kPre) prefetch_pending(depth_ - ahead, compute);
}

void Schedule::prefetch_pending(int count, const Stream& compute) const {
  for (auto next = pending_.rbegin(); next != pending_.rend() && count > 0; ++next) {
    if ((*next)->unit->is_root()) continue;
    prefetch(**next, compute, "backward");
    --count;
  }
}

void Schedule::end_backward(const Position& at, const Stream& compute, bool has_pending_uses) {
  Visitor* visitor = at.visitor;
  if (!visitor->backward || --visitor->backward->num_regions > 0) return;
  visitor->backward.reset();
  --num_open_backwards_;
  Unit& unit = *visitor->unit;
  unit.release();
  if (completes_gradient(*visitor, has_pending_uses)) end_gradient(*visitor, compute);
  if (visitor->recorded.empty() || placement_.reshard_after_forward) {
    unit.reshard(compute, !visitor->recorded.empty());
  }
  if (backward_ == BackwardPrefetch::kPost) prefetch_pending(depth_, compute);
}

bool Schedule::completes_gradient(const Visitor& visitor, bool has_pending_uses) const {
  return in_micro_step_ && !micro_step_.no_sync && num_backwards_ >= micro_step_.num_backwards &&
         visitor.recorded.empty() && !has_pending_uses;
}

void Schedule::end_gradient(Visitor& visitor, const Stream& compute) {
  visitor.end_gradient();
  reduces_all_ ? reduce_final(compute) : reduce(visitor, compute);
}

void Schedule::reduce_final(const Stream& compute) {
  for (Visitor* v : reduce_order_) {
    if (!v->is_final()) return;
    if (v->is_reduced()) continue;
    if (reduces_all_) v->unit->begin_gradient(compute);
    reduce(*v, compute);
  }
}

void Schedule::reduce(Visitor& visitor, const Stream& compute) {
  if (!visitor.unit->has_gradient()) return;
  visitor.unit->reduce_gradient(compute, is_last_);
  visitor.gradient = Gradient::kReduced;
  // The root's region is still open, and frozen parameters may be in use there.
  if (!is_last_ || !on_final_ || visitor.unit->is_root()) return;
  untold_.push_back(&visitor);
  tell_final(compute);
}

// A region that is still to be recomputed may visit a unit that is reduced.
void Schedule::tell_final(const Stream& compute) {
  if (!on_final_ || untold_.empty()) return;
  for (Visitor* v : std::exchange(untold_, {})) {
    const bool has_replays = replays_.has(*v->unit);
    if (!has_replays) close_visit(*v, compute);
    if (has_replays || v->visit || v->backward || !v->recorded.empty()) {
      untold_.push_back(v);
    } else {
      on_final_(*v->unit);
    }
  }
}

}  // namespace tessera::shard

#include "tools/planning/budget_search.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/error.h"
#include "shard/placement.h"

namespace tessera::tools {

namespace {

constexpr std::int64_t kFewBlocks = 16;  // whose plans take little time
constexpr std::int64_t kCannot = std::numeric_limits<std::int64_t>::max();

bool is_asked(const std::vector<std::int64_t>& levels) {
  return std::ranges::all_of(levels, [](std::int64_t level) { return level == 0; });
}

// From `asked` down to 0, at most five of them: halves of more.
std::vector<std::int64_t> counts_down(std::int64_t asked) {
  std::vector<std::int64_t> counts = {asked};
  while (counts.back() > 0) {
    counts.push_back(asked < 4 ? counts.back() - 1 : counts.back() / 2);
  }
  return counts;
}

}  // namespace

BudgetSearch::BudgetSearch(const TrainConfig& asked, std::int64_t budget_nbytes,
                           std::int64_t num_blocks, PlanMost plan_most, PlanMost plan_one)
    : asked_(asked),
      budget_(budget_nbytes),
      num_blocks_(num_blocks),
      plan_most_(std::move(plan_most)),
      plan_one_(std::move(plan_one)) {
  add_knobs();
}

void BudgetSearch::add(std::int64_t last, bool is_fine,
                       std::function<void(TrainConfig&, std::int64_t)> apply) {
  if (last > 0) knobs_.push_back({last, is_fine, std::move(apply)});
}

void BudgetSearch::add_offload(double OffloadConfig::*part) {
  constexpr std::int64_t kParts = 8;
  const double asked = asked_.offload.*part;
  add(asked < 1 ? kParts : 0, true, [part, asked](TrainConfig& c, std::int64_t level) {
    c.offload.*part = asked + (1 - asked) * static_cast<double>(level) / double{kParts};
  });
}

void BudgetSearch::add_knobs() {
  const shard::Placement placement = asked_.parallel.preset();
  const bool gathers = placement.parameters != shard::Place::kWhole;
  const auto add_count = [this](std::int64_t ParallelConfig::*count) {
    const std::vector<std::int64_t> counts = counts_down(asked_.parallel.*count);
    add(std::ssize(counts) - 1, false, [=](TrainConfig& c, std::int64_t level) {
      c.parallel.*count = counts[static_cast<std::size_t>(level)];
    });
  };
  if (gathers) add_count(&ParallelConfig::prefetch);
  add_count(&ParallelConfig::reductions_in_flight);
  const std::string& reshard = asked_.parallel.reshard_after_forward;
  const bool reshards = reshard == "true" || (reshard == "auto" && placement.reshard_after_forward);
  if (gathers && !reshards) {
    add(1, false, [](TrainConfig& c, std::int64_t) { c.parallel.reshard_after_forward = "true"; });
  }
  const std::int64_t recomputed = std::min(asked_.train.recompute.blocks, num_blocks_);
  if (recomputed < num_blocks_) {
    recompute_ = knobs_.size();
    add(num_blocks_ - recomputed, true,
        [recomputed, all = num_blocks_](TrainConfig& c, std::int64_t level) {
          const std::int64_t blocks = recomputed + level;
          c.train.recompute = blocks == all ? Recompute(true) : Recompute::first(blocks);
        });
  }
  add_offload(&OffloadConfig::optimizer);
  add_offload(&OffloadConfig::gradients);
  if (shard::can_offload_parameters(placement, asked_.precision)) {
    add_offload(&OffloadConfig::parameters);
  }
}

TrainConfig BudgetSearch::config_at(const Levels& at) const {
  TrainConfig config = asked_;
  for (std::size_t k = 0; k < knobs_.size(); ++k) {
    if (at[k] > 0) knobs_[k].apply(config, at[k]);
  }
  ParallelConfig& parallel = config.parallel;  // which has one way to gather nothing ahead
  if (parallel.prefetch == 0) parallel.backward_prefetch = shard::BackwardPrefetch::kPre;
  return config;
}

BudgetSearch::Found BudgetSearch::found(const Levels& at) {
  const Looked& looked = look(at);
  return {config_at(at), looked.nbytes, looked.step_ms, fits(looked)};
}

BudgetSearch::Looked BudgetSearch::plan(const Levels& at, const PlanMost& plan) {
  ++num_looked_;
  try {
    const TrainPlan made = plan(config_at(at));
    return {peak_nbytes(made), made.steps.back().step_ms};
  } catch (const engine::InvalidArgument&) {
    if (is_asked(at)) throw;
    return {kCannot, 0};  // options that do not go together: not a way
  }
}

const BudgetSearch::Looked& BudgetSearch::look(const Levels& at) {
  const auto it = looked_.find(at);
  if (it != looked_.end()) return it->second;
  const bool is_of_all = !plan_one_ || is_asked(at);
  Looked looked = plan(at, is_of_all ? plan_most_ : plan_one_);
  looked.is_most = is_of_all;
  return looked_.emplace(at, looked).first->second;
}

BudgetSearch::Found BudgetSearch::least() {
  const auto least = std::ranges::min_element(
      looked_, {}, [](const auto& looked) { return looked.second.nbytes; });
  return found(least->first);
}

// Whether anything fits with all given up, but for some of what is offloaded, as offload takes
// memory of its own.
bool BudgetSearch::any_fits() {
  std::vector<Levels> corners(1);
  for (std::size_t k = 0; k < knobs_.size(); ++k) {
    const std::size_t num = corners.size();
    for (std::size_t i = 0; i < num; ++i) {
      if (knobs_[k].is_fine && k != recompute_) {
        corners.push_back(corners[i]);
        corners.back().push_back(0);
      }
      corners[i].push_back(knobs_[k].last);
    }
  }
  return std::ranges::any_of(corners, [this](const Levels& at) { return fits(at); });
}

// All combinations of ends, and of the levels of what is not fine, with no block recomputed that is
// not asked for. With few blocks, of which each saves much, those of halves as well.
std::vector<BudgetSearch::Levels> BudgetSearch::fast_corners() const {
  const std::int64_t parts = num_blocks_ <= kFewBlocks ? 2 : 1;
  std::vector<Levels> corners(1);
  for (std::size_t k = 0; k < knobs_.size(); ++k) {
    std::vector<Levels> next;
    for (const Levels& corner : corners) {
      const std::int64_t last = k == recompute_ ? 0 : knobs_[k].last;
      const std::int64_t stride = knobs_[k].is_fine ? std::max<std::int64_t>(last / parts, 1) : 1;
      for (std::int64_t level = 0; level <= last; level += stride) {
        next.push_back(corner);
        next.back().push_back(level);
      }
    }
    corners = std::move(next);
  }
  return corners;
}

// Whether a plan is worth making. When many have been made, it must promise to save more.
bool BudgetSearch::may_be_faster(double bound_ms) const {
  constexpr std::int64_t kManyPlans = 60;
  const double worth = num_looked_ < kManyPlans * (num_blocks_ <= kFewBlocks ? 5 : 1) ? 1e-5 : 5e-3;
  return !fastest_ms_ || bound_ms < *fastest_ms_ * (1 - worth);
}

void BudgetSearch::offer(const Levels& at) {
  if (std::ranges::find(fitting_, at) == fitting_.end()) fitting_.push_back(at);
  const double step_ms = look(at).step_ms;
  if (!fastest_ms_ || step_ms < *fastest_ms_) fastest_ms_ = step_ms;
}

// From `corner`, which is too large, the first level of `knob` that fits, where the last one does.
void BudgetSearch::look_along(const Levels& corner, std::size_t knob) {
  Levels small = corner, large = corner;
  small[knob] = knobs_[knob].last;
  if (knob == recompute_ && !may_be_faster(look(large).step_ms)) return;
  if (!fits(small)) return;
  if (!may_be_faster(std::min(look(large).step_ms, look(small).step_ms))) return;
  for (int i = 0; small[knob] - large[knob] > 1; ++i) {
    const std::int64_t levels = small[knob] - large[knob];
    std::int64_t step = levels / 2;
    if (i % 3 != 2) {  // where a straight line says, but for a line that misleads
      const double over = static_cast<double>(look(large).nbytes - budget_);
      const double saves = static_cast<double>(look(large).nbytes - look(small).nbytes);
      step = static_cast<std::int64_t>(over / saves * static_cast<double>(levels)) + 1;
    }
    Levels middle = large;
    middle[knob] += std::clamp<std::int64_t>(step, 1, levels - 1);
    (fits(middle) ? small : large) = middle;
  }
  offer(small);
}

void BudgetSearch::look_around(const Levels& corner) {
  if (fits(corner)) return offer(corner);
  for (std::size_t k = 0; k < knobs_.size(); ++k) {
    if (knobs_[k].is_fine && corner[k] < knobs_[k].last) look_along(corner, k);
  }
  if (!recompute_ || corner[*recompute_] > 0 || !may_be_faster(look(corner).step_ms)) return;
  Levels recomputed = corner;
  recomputed[*recompute_] = knobs_[*recompute_].last;
  if (!fits(recomputed)) look_around(recomputed);
}

// An update may be fastest where the device and the host have a part each, which is on no edge.
void BudgetSearch::look_nearby() {
  constexpr int kMaxRounds = 8;
  for (int round = 0; round < kMaxRounds; ++round) {
    const double before_ms = *fastest_ms_;
    const Levels best = *std::ranges::min_element(
        fitting_, {}, [this](const Levels& at) { return look(at).step_ms; });
    for (std::size_t k = 0; k < knobs_.size(); ++k) {
      if (!knobs_[k].is_fine || k == recompute_) continue;
      for (const int by : {-1, 1}) {
        Levels at = best;
        at[k] += by;
        if (at[k] < 0 || at[k] > knobs_[k].last) continue;
        if (recompute_) at[*recompute_] = 0;
        if (!may_be_faster(look(at).step_ms)) continue;
        if (fits(at)) {
          offer(at);
        } else if (recompute_) {
          look_along(at, *recompute_);
        }
      }
    }
    if (*fastest_ms_ >= before_ms) return;
  }
}

void BudgetSearch::look_at_all() {
  std::vector<Levels> corners = fast_corners();
  std::ranges::stable_sort(corners, {}, [this](const Levels& at) { return look(at).step_ms; });
  for (const Levels& corner : corners) {
    if (!may_be_faster(look(corner).step_ms)) break;
    look_around(corner);
  }
  look_nearby();
}

// What fits of the rank that was looked at may be too much for another: then once more, with what
// is known of it.
std::vector<BudgetSearch::Found> BudgetSearch::run() {
  const Levels asked(knobs_.size(), 0);
  for (;;) {
    fitting_.clear();
    fastest_ms_.reset();
    if (fits(asked)) {
      offer(asked);
      break;
    }
    if (!any_fits()) break;
    look_at_all();
    std::ranges::sort(fitting_, std::greater(), [this](const Levels& at) {
      return std::pair(look(at).step_ms,
                       std::ranges::count_if(at, [](auto level) { return level > 0; }));
    });
    Looked& chosen = looked_.at(fitting_.back());
    if (!chosen.is_most) chosen = plan(fitting_.back(), plan_most_);
    chosen.is_most = true;
    if (fits(chosen)) break;
  }
  std::vector<Found> result;
  for (const Levels& at : fitting_) result.push_back(found(at));
  return result;
}

}  // namespace tessera::tools

#include "tools/train/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/placement.h"
#include "tools/models/model.h"

namespace tessera::tools {

using engine::require;

namespace {

constexpr std::string_view kRecomputeAll = "train.recompute=true";

struct Change {
  std::string_view what;
  std::function<bool(TrainConfig&)> apply;  // false: nothing to change
};

std::vector<Change> ladder() {
  const auto set = [](auto& field, auto value) {
    const bool changes = field != value;
    field = value;
    return changes;
  };
  const auto placement = [](const TrainConfig& c) {
    return shard::Placement::preset(c.parallel.strategy);
  };
  return {{"parallel.prefetch=0", [=](TrainConfig& c) { return set(c.parallel.prefetch, 0); }},
          {"parallel.reductions_in_flight=0",
           [=](TrainConfig& c) { return set(c.parallel.reductions_in_flight, 0); }},
          {"parallel.reshard_after_forward=true",
           [=](TrainConfig& c) {
             if (placement(c).parameters == shard::Place::kWhole) return false;
             if (c.parallel.reshard_after_forward == "auto" && placement(c).reshard_after_forward) {
               return false;
             }
             return set(c.parallel.reshard_after_forward, "true");
           }},
          {kRecomputeAll, [=](TrainConfig& c) { return set(c.train.recompute, Recompute(true)); }},
          {"offload.optimizer=1", [=](TrainConfig& c) { return set(c.offload.optimizer, 1.0); }},
          {"offload.gradients=1", [=](TrainConfig& c) { return set(c.offload.gradients, 1.0); }},
          {"offload.parameters=1", [=](TrainConfig& c) {
             if (!shard::can_offload_parameters(placement(c), c.precision)) return false;
             return set(c.offload.parameters, 1.0);
           }}};
}

// Of a plan that fits with all of `num_blocks` recomputed and not with the first `too_few`:
// recomputes as few as fit, and puts what was tried in place of the last rung.
void recompute_fewest(BudgetPlan& plan, std::int64_t too_few, std::int64_t num_blocks,
                      std::int64_t budget_nbytes, const PlanPeak& plan_peak) {
  std::int64_t enough = num_blocks;
  std::map<std::int64_t, std::int64_t> tried = {{num_blocks, plan.rungs.back().nbytes}};
  while (enough - too_few > 1) {
    const std::int64_t blocks = too_few + (enough - too_few) / 2;
    TrainConfig config = plan.config;
    config.train.recompute = Recompute::first(blocks);
    const std::int64_t nbytes = tried[blocks] = plan_peak(config);
    (nbytes <= budget_nbytes ? enough : too_few) = blocks;
  }
  plan.rungs.pop_back();
  for (const auto& [blocks, nbytes] : tried) {
    if (blocks > enough) break;
    const bool is_all = blocks == num_blocks;
    plan.rungs.push_back(
        {is_all ? std::string(kRecomputeAll) : fmt::format("train.recompute={}", blocks), nbytes});
  }
  if (enough < num_blocks) plan.config.train.recompute = Recompute::first(enough);
}

}  // namespace

BudgetPlan fit_budget(const TrainConfig& config, std::int64_t budget_nbytes,
                      std::int64_t num_blocks, const PlanPeak& plan_peak) {
  BudgetPlan plan{.config = config, .rungs = {{"as asked", plan_peak(config)}}};
  for (const Change& change : ladder()) {
    if (plan.rungs.back().nbytes <= budget_nbytes) return plan;
    const std::int64_t recomputed = plan.config.train.recompute.blocks;
    if (!change.apply(plan.config)) continue;
    plan.rungs.push_back({std::string(change.what), plan_peak(plan.config)});
    if (change.what == kRecomputeAll && plan.rungs.back().nbytes <= budget_nbytes) {
      recompute_fewest(plan, recomputed, num_blocks, budget_nbytes, plan_peak);
    }
  }
  require(plan.rungs.back().nbytes <= budget_nbytes,
          "[memory_budget] expected a way to train within {} bytes per rank, got none:\n  {}",
          engine::with_commas(budget_nbytes),
          fmt::join(lines_of(plan.rungs, budget_nbytes), "\n  "));
  return plan;
}

std::int64_t most_of_ranks(const TrainConfig& config, int num_ranks,
                           const std::function<std::int64_t(int rank)>& peak) {
  const auto is_part = [](double fraction) { return fraction > 0 && fraction < 1; };
  const OffloadConfig& offload = config.offload;
  const bool differ =
      is_part(offload.parameters) || is_part(offload.gradients) || is_part(offload.optimizer);
  std::int64_t most = 0;
  for (int rank = 0; rank < (differ ? num_ranks : 1); ++rank) most = std::max(most, peak(rank));
  return most;
}

std::vector<std::string> lines_of(const std::vector<BudgetRung>& rungs,
                                  std::int64_t budget_nbytes) {
  std::vector<std::string> lines = {
      fmt::format("memory budget of {} bytes per rank:", engine::with_commas(budget_nbytes))};
  for (const BudgetRung& rung : rungs) {
    lines.push_back(fmt::format("  {:<38}{:>20} B  {}", rung.what, engine::with_commas(rung.nbytes),
                                rung.nbytes <= budget_nbytes ? "fits" : "too much"));
  }
  return lines;
}

}  // namespace tessera::tools

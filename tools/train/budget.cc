#include "tools/train/budget.h"

#include <fmt/format.h>

#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/placement.h"

namespace tessera::tools {

using engine::require;

namespace {

struct Change {
  std::string what;
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
          {"train.recompute=true", [=](TrainConfig& c) { return set(c.train.recompute, true); }},
          {"offload.optimizer=1", [=](TrainConfig& c) { return set(c.offload.optimizer, 1.0); }},
          {"offload.gradients=1", [=](TrainConfig& c) { return set(c.offload.gradients, 1.0); }},
          {"offload.parameters=1", [=](TrainConfig& c) {
             if (!shard::can_offload_parameters(placement(c), c.precision)) return false;
             return set(c.offload.parameters, 1.0);
           }}};
}

}  // namespace

BudgetPlan fit_budget(const TrainConfig& config, std::int64_t budget_nbytes,
                      const std::function<std::int64_t(const TrainConfig&)>& plan_peak) {
  BudgetPlan plan{.config = config, .rungs = {{"as asked", plan_peak(config)}}};
  for (const Change& change : ladder()) {
    if (plan.rungs.back().nbytes <= budget_nbytes) return plan;
    if (!change.apply(plan.config)) continue;
    plan.rungs.push_back({change.what, plan_peak(plan.config)});
  }
  require(plan.rungs.back().nbytes <= budget_nbytes,
          "[memory_budget] expected a way to train within {} bytes per rank, got none:\n  {}",
          engine::with_commas(budget_nbytes),
          fmt::join(lines_of(plan.rungs, budget_nbytes), "\n  "));
  return plan;
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

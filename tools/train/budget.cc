#include "tools/train/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/placement.h"
#include "tools/models/model.h"
#include "tools/train/plan_report.h"

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
                      std::int64_t budget_nbytes, const PlanMost& plan_most) {
  std::int64_t enough = num_blocks;
  std::map<std::int64_t, std::int64_t> tried = {{num_blocks, plan.rungs.back().nbytes}};
  while (enough - too_few > 1) {
    const std::int64_t blocks = too_few + (enough - too_few) / 2;
    TrainConfig config = plan.config;
    config.train.recompute = Recompute::first(blocks);
    const std::int64_t nbytes = tried[blocks] = peak_nbytes(plan_most(config));
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

nlohmann::ordered_json options_of(TrainConfig config) {
  FlagSet flags("options", "");
  config.add_to(flags);
  return nlohmann::ordered_json::parse(flags.to_json());
}

// Those of `b` that are not the same in `a`.
std::vector<std::pair<std::string, std::string>> changes(const TrainConfig& a,
                                                         const TrainConfig& b) {
  const nlohmann::ordered_json before = options_of(a), after = options_of(b);
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& [name, value] : after.items()) {
    if (before.at(name) != value) result.emplace_back(name, value.dump());
  }
  return result;
}

}  // namespace

BudgetPlan fit_budget(const TrainConfig& config, std::int64_t budget_nbytes,
                      std::int64_t num_blocks, const PlanMost& plan_most) {
  TrainPlan last = plan_most(config);
  BudgetPlan plan{.config = config, .rungs = {{"as asked", peak_nbytes(last)}}};
  for (const Change& change : ladder()) {
    if (plan.rungs.back().nbytes <= budget_nbytes) break;
    const std::int64_t recomputed = plan.config.train.recompute.blocks;
    if (!change.apply(plan.config)) continue;
    last = plan_most(plan.config);
    plan.rungs.push_back({std::string(change.what), peak_nbytes(last)});
    if (change.what == kRecomputeAll && plan.rungs.back().nbytes <= budget_nbytes) {
      recompute_fewest(plan, recomputed, num_blocks, budget_nbytes, plan_most);
    }
  }
  require(plan.rungs.back().nbytes <= budget_nbytes,
          "[memory_budget] expected a way to train within {} bytes per rank, got none:\n  {}\n  {}",
          engine::with_commas(budget_nbytes),
          fmt::join(lines_of(plan.rungs, budget_nbytes), "\n  "),
          fmt::join(largest_lines(last), "\n  "));
  plan.options = changes(config, plan.config);
  return plan;
}

TrainPlan most_of_ranks(int num_ranks, const std::function<std::string(int rank)>& kind,
                        const std::function<TrainPlan(int rank)>& plan) {
  std::set<std::string> planned = {kind(0)};
  TrainPlan most = plan(0);
  for (int rank = 1; rank < num_ranks; ++rank) {
    if (!planned.insert(kind(rank)).second) continue;
    TrainPlan other = plan(rank);
    if (peak_nbytes(other) > peak_nbytes(most)) most = std::move(other);
  }
  return most;
}

TrainConfig without_budget(const TrainConfig& config) {
  TrainConfig unlimited = config;
  if (!config.memory_budget.empty()) unlimited.cuda.graph = GraphChoice::kOff;  // as the run
  unlimited.memory_budget.clear();
  return unlimited;
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

JsonRecord budget_record(const BudgetPlan& plan, std::int64_t budget_nbytes) {
  std::vector<std::string> rungs;
  for (const BudgetRung& rung : plan.rungs) {
    rungs.push_back(JsonRecord()
                        .add("what", rung.what)
                        .add("peak_bytes", rung.nbytes)
                        .add("fits", rung.nbytes <= budget_nbytes)
                        .text());
  }
  JsonRecord options;
  for (const auto& [name, literal] : plan.options) options.add_literal(name, literal);
  JsonRecord record;
  record.add("bytes", budget_nbytes)
      .add_literal("rungs", fmt::format("[{}]", fmt::join(rungs, ",")))
      .add_literal("options", options.text());
  if (plan.num_plans > 0) record.add("num_plans", plan.num_plans);
  return record;
}

}  // namespace tessera::tools

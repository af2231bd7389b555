#include "tools/planning/task_plan.h"

#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tools/planning/budget.h"

namespace tessera::tools {

PlanTarget plan_target(const Ranks& ranks, const TrainConfig& config, int rank) {
  return {.num_ranks = ranks.size,
          .rank = rank,
          .on_gpus = ranks.num_gpus > 0,
          .sums_in_rank_order = ranks.sums_in_rank_order(config.parallel),
          .stages = ranks.nccl || ranks.are_processes(),
          .num_processes = ranks.launch.num_processes,
          .rates = config.rates.rates(ranks.num_gpus > 0, config.precision.param)};
}

namespace {

TrainPlan plan_with(const Task& task, const TrainConfig& config, const PlanTarget& target,
                    TraceWriter* trace = nullptr) {
  const std::unique_ptr<TaskRank> rank = task.rank();
  return make_plan(without_budget(config), target, rank->model(), rank->data().tensors, trace,
                   rank->unrecorded_passes());
}

}  // namespace

TrainPlan plan_task(const Task& task, const Ranks& ranks, int rank, TraceWriter* trace) {
  const TrainConfig& config = task.config();
  return plan_with(task, config, plan_target(ranks, config, rank), trace);
}

std::vector<engine::DeviceProduct> gemms_of(const Task& task, const Ranks& ranks) {
  PlanTarget target = plan_target(ranks, task.config());
  target.gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
  plan_with(task, task.config(), target);
  return *target.gemms;
}

std::vector<std::string> fit_task(Task& task, const Ranks& ranks) {
  TrainConfig& config = task.config();
  const std::int64_t budget = config.memory_limit_nbytes();
  if (budget == 0) return {};
  const TrainConfig asked = config;
  const auto plan_of = [&](const TrainConfig& c, int rank) {
    config = c;  // of which batches are
    return plan_with(task, c, plan_target(ranks, c, rank));
  };
  BudgetPlan fitted;
  try {
    fitted = fit_budget(
        asked, budget, std::ssize(task.rank()->model().blocks()),
        [&](const TrainConfig& c) {
          return most_of_ranks(
              ranks.size,
              [&](int rank) {
                return rank_kind(without_budget(c), plan_target(ranks, c, rank),
                                 task.rank()->model());
              },
              [&](int rank) { return plan_of(c, rank); });
        },
        [&](const TrainConfig& c) { return plan_of(c, 0); });
  } catch (...) {
    config = asked;
    throw;
  }
  config = fitted.config;
  return lines_of(fitted, budget);
}

}  // namespace tessera::tools

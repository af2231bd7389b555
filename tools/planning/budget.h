// A limit of memory, and what a training can do without to stay below it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tools/config/train_config.h"
#include "tools/io/jsonl.h"
#include "tools/planning/budget_search.h"
#include "tools/planning/planner.h"

namespace tessera::tools {

/// A way to train.
struct BudgetRung {
  std::string what;     ///< "as asked", "parallel.prefetch=0, train.recompute=13"
  std::int64_t nbytes;  ///< planned peak of a rank's device
  double step_ms = 0;   ///< planned time of a step
  bool fits = false;    ///< the budget
};

struct BudgetPlan {
  TrainConfig config;             ///< that of the last rung
  std::vector<BudgetRung> rungs;  ///< what was asked for, and ways that fit, the fastest last
  /// Options that differ from what was asked, and their values as JSON literals.
  std::vector<std::pair<std::string, std::string>> options = {};
  std::int64_t num_plans = 0;  ///< that were made
  /// What changes the arithmetic, in words; empty: nothing does.
  std::string remark = {};
};

/// The fastest way to train by planned time that fits `budget_nbytes`: what is asked for, if it
/// does, or with fewer gathers ahead, fewer reductions in flight, resharding after forward, blocks
/// of a model of `num_blocks` recomputed, parts of the optimizer's state, gradients and parameters
/// on the host. None of these changes a bit on CPU ranks, or on GPUs that add in the order of
/// ranks. If none fits, smaller micro-batches, and as many more of them a step, are tried as well:
/// the same samples, whose sums are rounded otherwise. Throws InvalidArgument with what is largest
/// of what needs least, and the smallest budget that fits, if nothing does. `plan_one`: plans one
/// rank, for the search; null: all are planned by `plan_most`.
BudgetPlan fit_budget(const TrainConfig& config, std::int64_t budget_nbytes,
                      std::int64_t num_blocks, const PlanMost& plan_most,
                      const PlanMost& plan_one = nullptr);

/// Of `num_ranks` the one that needs most, the first of them: `plan` plans one rank of each `kind`,
/// as rank_kind() returns it.
TrainPlan most_of_ranks(int num_ranks, const std::function<std::string(int rank)>& kind,
                        const std::function<TrainPlan(int rank)>& plan);

/// To be planned: without its budget, which a plan may exceed, and else as it would be trained.
TrainConfig without_budget(const TrainConfig& config);

/// A table of the rungs, and the remark.
std::vector<std::string> lines_of(const BudgetPlan& plan, std::int64_t budget_nbytes);
/// The plan as one JSON object, with the options that were changed.
JsonRecord budget_record(const BudgetPlan& plan, std::int64_t budget_nbytes);

}  // namespace tessera::tools

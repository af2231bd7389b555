// A limit of memory, and what a training can do without to stay below it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tools/io/jsonl.h"
#include "tools/train/planner.h"
#include "tools/train/train_config.h"

namespace tessera::tools {

/// A rung of the ladder.
struct BudgetRung {
  std::string what;     ///< "as asked", "parallel.prefetch=0"
  std::int64_t nbytes;  ///< planned peak of a rank's device, with the rungs above
};

struct BudgetPlan {
  TrainConfig config;             ///< that of the last rung
  std::vector<BudgetRung> rungs;  ///< tried, the last one fits
  /// Options that differ from what was asked, and their values as JSON literals.
  std::vector<std::pair<std::string, std::string>> options = {};
  std::int64_t num_plans = 0;  ///< that were made, of ranks and rungs; 0: not counted
};

/// Plans a configuration: of the rank that needs most.
using PlanMost = std::function<TrainPlan(const TrainConfig&)>;

/// Walks down what costs time and saves memory until the plan fits `budget_nbytes`: gathers ahead,
/// reductions in flight, resharding after forward, recomputing as few blocks of a model of
/// `num_blocks` as fit, or all, offloading the optimizer's state, gradients, parameters; each
/// beside those before it. None changes a bit, but on a GPU that of the optimizer's state: an
/// update on the host may differ in the last. Throws InvalidArgument with all that was tried, and
/// what is largest of the last, if nothing fits.
BudgetPlan fit_budget(const TrainConfig& config, std::int64_t budget_nbytes,
                      std::int64_t num_blocks, const PlanMost& plan_most);

/// Of `num_ranks` the one that needs most, the first of them: `plan` plans one rank of each `kind`,
/// as rank_kind() returns it.
TrainPlan most_of_ranks(int num_ranks, const std::function<std::string(int rank)>& kind,
                        const std::function<TrainPlan(int rank)>& plan);

/// To be planned: without its budget, which a plan may exceed, and else as it would be trained.
TrainConfig without_budget(const TrainConfig& config);

/// A table of the rungs.
std::vector<std::string> lines_of(const std::vector<BudgetRung>& rungs, std::int64_t budget_nbytes);
/// The same as one JSON object, with the options that were changed.
JsonRecord budget_record(const BudgetPlan& plan, std::int64_t budget_nbytes);

}  // namespace tessera::tools

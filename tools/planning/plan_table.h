// Plans of several configurations side by side, and which of them is the fastest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/io/jsonl.h"
#include "tools/planning/planner.h"

namespace tessera::tools {

struct PlanRow {
  std::string name;
  std::string refusal = {};  ///< why it cannot be trained; empty: it can, and all else is there
  PlanTarget target = {};
  TrainPlan plan = {};
  std::int64_t peak_nbytes = 0;    ///< the most that a rank's device holds over the whole run
  double tokens = 0;               ///< of a step, of all ranks
  double flops = 0;                ///< of the model in a step, of one rank
  std::int64_t budget_nbytes = 0;  ///< 0: none
  bool exceeds_budget = false;     ///< whatever options are changed; then all is as asked
  std::vector<std::string> remarks = {};  ///< lines, such as that a hybrid cuts nothing, or empty
  /// Options that differ from what was asked so that it fits the budget; their values as JSON.
  std::vector<std::pair<std::string, std::string>> changes = {};

  bool is_planned() const { return refusal.empty(); }
  /// Whether it can be trained, within its budget if it has one.
  bool fits() const { return is_planned() && !exceeds_budget; }
  const StepRecord& step() const { return plan.steps.back(); }
  double tokens_per_s() const { return tokens / (step().step_ms * 1e-3); }
  /// Model FLOPs utilisation: of what the rates let a rank compute in the time of a step.
  double mfu() const { return flops / (step().step_ms * 1e-3 * target.rates.flops_per_s); }
};

/// Whether the plans say the same of memory, of every collective and of time.
bool are_equal(const PlanRow& a, const PlanRow& b);

/// Indices of those that fit and make most tokens a second, and of those that make as many within
/// 0.5 %, fastest first; empty if none fits.
std::vector<std::size_t> fastest_of(const std::vector<PlanRow>& rows);

/// A table, what it leaves open, and a verdict.
std::vector<std::string> table_lines(const std::vector<PlanRow>& rows);
/// The figures of the table as one JSON object.
JsonRecord table_record(const std::vector<PlanRow>& rows);

}  // namespace tessera::tools

// Plans of train_transformer from its options alone: without data, memory, GPUs or ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/models/language_model.h"
#include "tools/planning/budget.h"
#include "tools/planning/plan_table.h"
#include "tools/planning/planner.h"
#include "tools/programs/transformer_config.h"

namespace tessera::tools {

/// Of `config`, which is `asked` or what a budget made of it, and a `model` of
/// asked.model_config(). Of `target`, on whose `rank`. A budget is left out: the plan may exceed
/// it. `trace`: see make_plan(). Throws what the training would for a configuration that cannot
/// run.
TrainPlan plan_transformer(const TransformerConfig& asked, const TrainConfig& config,
                           LanguageModel& model, const PlanTarget& target,
                           TraceWriter* trace = nullptr);

/// Of a batch of so many sequences: tokens and targets, (batch, seq) each, and with packing
/// positions as well.
std::vector<BatchTensor> token_tensors(std::int64_t batch, std::int64_t seq, bool packing);

/// A batch of a validation of `model`.
UnrecordedPass validation_pass(LanguageModel& model, std::vector<BatchTensor> tensors);

/// What of the sample that ends a training within a budget takes most memory: nothing is kept, so
/// its last token is drawn from a forward over all before it, as many as `model` has positions,
/// which may be more than a sequence has. None without a budget or a sample.
std::optional<UnrecordedPass> sample_pass(const TransformerConfig& config, LanguageModel& model);

/// What fit_budget() makes of a configuration with a memory_budget.
BudgetPlan fit_transformer(const TransformerConfig& config, LanguageModel& model,
                           const PlanTarget& target);

/// A row for `config`, with what its budget makes of it. Throws as plan_transformer(), but not for
/// a budget that nothing meets.
PlanRow plan_row(std::string name, const TransformerConfig& config, LanguageModel& model,
                 const PlanTarget& target);

}  // namespace tessera::tools

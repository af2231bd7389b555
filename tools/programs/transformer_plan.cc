#include "tools/programs/transformer_plan.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/dtype.h"
#include "engine/error.h"
#include "engine/tensor.h"
#include "tools/config/replicas.h"

namespace tessera::tools {

namespace {

std::int64_t seq_of(const TransformerConfig& config, const LanguageModel& model) {
  return config.model.seq == 0 ? model.max_tokens() : config.model.seq;
}

}  // namespace

TrainPlan plan_transformer(const TransformerConfig& asked, const TrainConfig& config,
                           LanguageModel& model, const PlanTarget& target, TraceWriter* trace) {
  const std::vector<BatchTensor> batch =
      token_tensors(config.train.batch, seq_of(asked, model), asked.data.packing);
  std::vector<UnrecordedPass> unrecorded = {validation_pass(model, batch)};
  if (auto sample = sample_pass(asked, model)) unrecorded.push_back(*std::move(sample));
  return make_plan(without_budget(config), target, model, batch, trace, unrecorded);
}

std::vector<BatchTensor> token_tensors(std::int64_t batch, std::int64_t seq, bool packing) {
  std::vector<BatchTensor> tensors;
  for (const char* name : {"tokens", "targets", "positions"})
    tensors.push_back({name, {batch, seq}, engine::DType::kI32});
  if (!packing) tensors.pop_back();
  return tensors;
}

UnrecordedPass validation_pass(LanguageModel& model, std::vector<BatchTensor> tensors) {
  return {"validation", std::move(tensors), [&model](engine::Tape& tape, const Batch& batch) {
            model.loss(tape, batch, {.training = false});
          }};
}

std::optional<UnrecordedPass> sample_pass(const TransformerConfig& config, LanguageModel& model) {
  if (config.memory_limit_nbytes() == 0 || config.sample_tokens == 0) return std::nullopt;
  const std::int64_t most = std::min(config.sample_tokens, model.max_tokens());
  return UnrecordedPass{"sample",
                        {{"tokens", {1, most}, engine::DType::kI32}},
                        [&model](engine::Tape& tape, const Batch& batch) {
                          model.next_token_logits(tape, batch[0]);
                        }};
}

BudgetPlan fit_transformer(const TransformerConfig& config, LanguageModel& model,
                           const PlanTarget& target) {
  const auto on = [&target](int rank) {
    PlanTarget of_rank = target;
    of_rank.rank = rank;
    return of_rank;
  };
  std::int64_t num_plans = 0;
  const auto plan_of = [&](const TrainConfig& c, int rank) {
    ++num_plans;
    return plan_transformer(config, c, model, on(rank));
  };
  const auto most = [&](const TrainConfig& c) {
    return most_of_ranks(
        target.num_ranks, [&](int rank) { return rank_kind(without_budget(c), on(rank), model); },
        [&](int rank) { return plan_of(c, rank); });
  };
  BudgetPlan plan = fit_budget(config, config.memory_limit_nbytes(), std::ssize(model.blocks()),
                               most, [&](const TrainConfig& c) { return plan_of(c, 0); });
  plan.num_plans = num_plans;
  return plan;
}

PlanRow plan_row(std::string name, const TransformerConfig& config, LanguageModel& model,
                 const PlanTarget& target) {
  const std::int64_t samples = config.train.batch * config.train.accum, seq = seq_of(config, model);
  PlanRow row{.name = std::move(name),
              .target = target,
              .plan = plan_transformer(config, config, model, target),
              .tokens = static_cast<double>(samples * seq) * target.num_ranks,
              .flops = static_cast<double>(samples) * model.train_flops(seq),
              .budget_nbytes = config.memory_limit_nbytes(),
              .remarks = {replicas_warning(config, target.num_ranks)}};
  row.peak_nbytes = peak_nbytes(row.plan);
  if (row.budget_nbytes == 0) return row;
  try {
    BudgetPlan fitted = fit_transformer(config, model, target);
    row.peak_nbytes = fitted.rungs.back().nbytes;
    row.plan = plan_transformer(config, fitted.config, model, target);
    row.changes = std::move(fitted.options);
    row.remarks.push_back(fitted.remark);
  } catch (const engine::InvalidArgument&) {
    row.exceeds_budget = true;  // and shows what was asked for
  }
  return row;
}

}  // namespace tessera::tools

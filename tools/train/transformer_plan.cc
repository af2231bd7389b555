#include "tools/train/transformer_plan.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/dtype.h"
#include "engine/tensor.h"

namespace tessera::tools {

TrainPlan plan_transformer(const TransformerConfig& asked, const TrainConfig& config, Gpt& model,
                           const PlanTarget& target, TraceWriter* trace) {
  const engine::Shape shape{config.train.batch,
                            asked.model.seq == 0 ? model.config().seq : asked.model.seq};
  const std::vector<BatchTensor> batch = {{"tokens", shape, engine::DType::kI32},
                                          {"targets", shape, engine::DType::kI32}};
  return make_plan(without_budget(config), target, model, batch, trace,
                   {validation_pass(model, batch)});
}

BesidePass validation_pass(Gpt& model, std::vector<BatchTensor> tensors) {
  return {"validation", std::move(tensors), [&model](engine::Tape& tape, const Batch& batch) {
            model.loss(tape, batch, {.training = false});
          }};
}

BudgetPlan fit_transformer(const TransformerConfig& config, Gpt& model, const PlanTarget& target) {
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
  BudgetPlan plan = fit_budget(config, config.memory_limit_nbytes(), model.config().layers, most,
                               [&](const TrainConfig& c) { return plan_of(c, 0); });
  plan.num_plans = num_plans;
  return plan;
}

}  // namespace tessera::tools

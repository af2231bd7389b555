// A small GPT whose trainings are planned and run: what tests of plans and of budgets share.
#pragma once

#include <string>

#include "tests/tools/testing/gpt_run.h"
#include "tools/planning/planner.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::testing {

inline constexpr tools::GptConfig kModel = {
    .layers = 4, .heads = 3, .dim = 39, .seq = 17, .vocab = 307, .dropout = 0.1};

inline const tools::TokenDataset& tokens() {
  static const tools::TokenDataset data = [] {
    const TempFolder folder;
    return tools::TokenDataset(
        tools::TokenFile(folder.write("tokens.bin", std::string(8000, '\1'))),
        {.seq = kModel.seq, .vocab = kModel.vocab});
  }();
  return data;
}

inline tools::TrainConfig base(int ranks) {
  tools::TrainConfig config;
  config.device = tools::DeviceChoice::kCpu;
  config.parallel.ranks = ranks;
  config.train.steps = 5;
  config.train.batch = 1;
  config.train.lr = 1e-3;
  config.out = "unused";
  return config;
}

inline tools::TrainPlan plan_of(const tools::TrainConfig& config,
                                const tools::GptConfig& sizes = kModel, int rank = 0) {
  tools::Gpt model(sizes);
  const engine::Shape shape{config.train.batch, sizes.seq};
  return tools::make_plan(
      config, {.num_ranks = static_cast<int>(config.parallel.ranks), .rank = rank}, model,
      {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}});
}

inline std::string kind_of(const tools::TrainConfig& config, int rank) {
  tools::Gpt model(kModel);
  return tools::rank_kind(
      config, {.num_ranks = static_cast<int>(config.parallel.ranks), .rank = rank}, model);
}

}  // namespace tessera::testing

// Small models of Llama's kind, trained as tests/golden/make_llama_golden.py trains them.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/models/family.h"

namespace tessera::tools::llama_golden {

inline const std::string kFolder = "tests/golden/llama/";

inline nlohmann::json golden() {
  return testing::parse_json(engine::read_text_file(kFolder + "sgd.json", 1 << 20));
}

/// Of the models.
inline std::vector<std::string> names() {
  const nlohmann::json all = golden();
  std::vector<std::string> names;
  for (const auto& [name, run] : all.at("runs").items()) names.push_back(name);
  return names;
}

/// Of the golden steps the first config.train.steps, or all if that is 0, on config.device.
inline testing::GptRun train(const std::string& name, std::int64_t ranks, TrainConfig config) {
  const nlohmann::json training = golden().at("training");
  const ModelConfig model = read_model_config(kFolder + name);
  config.parallel.ranks = ranks;
  if (config.train.steps == 0) config.train.steps = training.at("steps");
  config.train.batch = training.at("batch").get<std::int64_t>() / ranks;
  config.train.optimizer = OptimizerKind::kSgd;
  config.train.lr = training.at("lr");
  config.train.momentum = training.at("momentum");
  config.train.schedule = ScheduleKind::kConstant;
  config.train.grad_clip = 0;
  const std::int64_t seq = training.at("seq");
  const TokenDataset data(TokenFile(kFolder + "tokens.bin"), {.seq = seq, .vocab = model.vocab});
  return testing::run_model(
      config, [&] { return model.make(); }, seq, data, kFolder + name);
}

/// As far as `got` goes.
inline void expect_near(const std::vector<double>& got, const nlohmann::json& want,
                        double tolerance, const char* what) {
  ASSERT_LE(got.size(), want.size()) << what;
  ASSERT_FALSE(got.empty()) << what;
  for (std::size_t step = 0; step < got.size(); ++step) {
    const double expected = want[step];
    EXPECT_NEAR(got[step], expected, tolerance * expected) << what << " of step " << step;
  }
}

}  // namespace tessera::tools::llama_golden

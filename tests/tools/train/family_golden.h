// Small models of Llama's kind and of GPT-NeoX, trained as tests/golden/make_llama_golden.py trains
// them.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/models/family.h"

namespace tessera::tools::family_golden {

inline const std::string kRoot = "tests/golden/";

/// What transformers made of the models of a folder, "llama".
inline nlohmann::json golden(const std::string& folder) {
  return testing::parse_json(engine::read_text_file(kRoot + folder + "/sgd.json", 1 << 20));
}

/// A model: "llama/qwen2_tied".
struct GoldenModel {
  std::string folder, name;

  std::string path() const { return kRoot + folder + "/" + name; }
  nlohmann::json run() const { return golden(folder).at("runs").at(name); }
  std::string tokens() const { return kRoot + folder + "/tokens.bin"; }

  friend std::ostream& operator<<(std::ostream& out, const GoldenModel& model) {
    return out << model.name;
  }
};

inline std::vector<GoldenModel> models() {
  std::vector<GoldenModel> models;
  for (const char* folder : {"llama", "gpt_neox"}) {
    const nlohmann::json all = golden(folder);
    for (const auto& [name, run] : all.at("runs").items()) models.push_back({folder, name});
  }
  return models;
}

/// Of the golden steps the first config.train.steps, or all if that is 0, on config.device. Their
/// sequences are shared by the ranks and by config.train.accum micro-batches of each.
inline testing::GptRun train(const GoldenModel& golden_model, std::int64_t ranks,
                             TrainConfig config) {
  const nlohmann::json training = golden(golden_model.folder).at("training");
  const ModelConfig model = read_model_config(golden_model.path());
  config.parallel.ranks = ranks;
  if (config.train.steps == 0) config.train.steps = training.at("steps");
  config.train.batch = training.at("batch").get<std::int64_t>() / (ranks * config.train.accum);
  config.train.optimizer = OptimizerKind::kSgd;
  config.train.lr = training.at("lr");
  config.train.momentum = training.at("momentum");
  config.train.schedule = ScheduleKind::kConstant;
  config.train.grad_clip = 0;
  const std::int64_t seq = training.at("seq");
  const TokenDataset data(TokenFile(golden_model.tokens()), {.seq = seq, .vocab = model.vocab});
  return testing::run_model(
      config, [&] { return model.make(); }, seq, data, golden_model.path());
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

}  // namespace tessera::tools::family_golden

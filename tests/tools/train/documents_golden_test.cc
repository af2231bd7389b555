// Documents of which a part is learned: small models train on them as they do in Hugging Face
// transformers, however many of them each rank and micro-step has. See
// tests/golden/make_llama_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/gpt_run.h"
#include "tests/tools/testing/marked.h"
#include "tests/tools/train/family_golden.h"
#include "tools/data/token_writer.h"
#include "tools/models/family.h"

namespace tessera::tools {
namespace {

using namespace family_golden;  // NOLINT: the harness
using testing::GptRun;
using testing::TempFolder;

constexpr std::int64_t kBatch = 6, kSeq = 12;  // sequences of a step, and their tokens

nlohmann::json golden_documents() {
  return testing::parse_json(engine::read_text_file(kRoot + "llama/documents.json", 1 << 20));
}

class Documents : public ::testing::Test {
 protected:
  Documents() {
    TokenWriter writer(37, /*keeps_documents=*/true);
    for (const auto& document : golden_.at("documents")) {
      writer.add_document(
          testing::marked(document[0].get<std::vector<std::int32_t>>(), document[1]));
    }
    writer.write(folder_ / "documents.bin");
  }

  TokenDataset data(bool packing = false) const {
    return {TokenFile(folder_ / "documents.bin"), {.seq = kSeq, .vocab = 37, .packing = packing}};
  }

  /// The golden steps of a model, dealt to so many ranks and micro-steps.
  GptRun train(const std::string& name, std::int64_t ranks, std::int64_t accum,
               TrainConfig config) const {
    config.train.steps = golden_.at("steps");
    config.train.batch = kBatch / ranks / accum;
    return train(name, ranks, accum, std::move(config), data());
  }
  /// As many steps as the config says, of its batch.
  GptRun train(const std::string& name, std::int64_t ranks, std::int64_t accum, TrainConfig config,
               const TokenDataset& data) const {
    const nlohmann::json training = golden("llama").at("training");
    const ModelConfig model = read_model_config(kRoot + "llama/" + name);
    config.device = DeviceChoice::kCpu;
    config.parallel.ranks = ranks;
    config.train.accum = accum;
    config.train.optimizer = OptimizerKind::kSgd;
    config.train.lr = training.at("lr");
    config.train.momentum = training.at("momentum");
    config.train.schedule = ScheduleKind::kConstant;
    config.train.grad_clip = 0;
    return testing::run_model(
        config, [&] { return model.make(); }, kSeq, data, kRoot + "llama/" + name);
  }

  const nlohmann::json golden_ = golden_documents();
  const TempFolder folder_;
};

TrainConfig over_tokens() {
  TrainConfig config;
  config.train.loss_mean = LossMean::kTokens;
  return config;
}

TEST_F(Documents, TrainAsInTransformers) {
  for (const auto& [name, want] : golden_.at("runs").items()) {
    EXPECT_EQ(data().num_sequences(), want.at("num_sequences"));
    for (const auto& [ranks, accum] : {std::pair{1, 1}, {1, 3}, {2, 1}, {3, 2}}) {
      SCOPED_TRACE(name + ", " + std::to_string(ranks) + " ranks, " + std::to_string(accum));
      const GptRun run = train(name, ranks, accum, over_tokens());
      ASSERT_EQ(run.loss.size(), want.at("loss").size());
      expect_near(run.loss, want.at("loss"), 1e-5, "loss");
      expect_near(run.grad_norm, want.at("grad_norm"), 1e-4, "gradient norm");
    }
  }
}

// Sums of micro-batches of one sequence each, whoever makes them.
TEST_F(Documents, TheirMeanHasTheBitsOfOneRankUnderEveryStrategy) {
  const std::string want = train("llama_grouped", 1, 6, over_tokens()).params_sha256;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    for (const auto& [ranks, accum] : {std::pair{2, 3}, {3, 2}, {6, 1}}) {
      TrainConfig config = over_tokens();
      config.parallel.strategy = strategy;
      EXPECT_EQ(train("llama_grouped", ranks, accum, config).params_sha256, want)
          << strategy << ", " << ranks << " ranks";
    }
  }
}

// Steps of all documents: what is learned of them is the same wherever they are.
TEST_F(Documents, PackedAreLearnedAsOneInASequence) {
  const TokenDataset alone = data(), packed = data(/*packing=*/true);
  EXPECT_LT(packed.num_sequences(), alone.num_sequences() * 9 / 10);
  TrainConfig config = over_tokens();
  config.train.steps = 5;
  for (const char* name : {"llama_grouped", "qwen2_tied"}) {
    SCOPED_TRACE(name);
    config.train.batch = alone.num_sequences();
    const GptRun want = train(name, 1, 1, config, alone);
    config.train.batch = packed.num_sequences();
    const GptRun run = train(name, 1, 1, config, packed);
    expect_near(run.loss, want.loss, 1e-6, "loss");
    expect_near(run.grad_norm, want.grad_norm, 1e-5, "gradient norm");
  }
}

TEST_F(Documents, PackedHaveTheBitsOfOneRankUnderEveryStrategy) {
  const TokenDataset packed = data(/*packing=*/true);
  TrainConfig config = over_tokens();
  config.train.steps = 4;
  config.train.batch = 1;
  const std::string want = train("llama_grouped", 1, 6, config, packed).params_sha256;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    for (const auto& [ranks, accum] : {std::pair{2, 3}, {3, 2}}) {
      config.parallel.strategy = strategy;
      config.train.recompute = ranks == 3;
      EXPECT_EQ(train("llama_grouped", ranks, accum, config, packed).params_sha256, want)
          << strategy << ", " << ranks << " ranks";
    }
  }
}

// Which weighs the targets of short documents more, and depends on how they are dealt.
TEST_F(Documents, AMeanOfMeansIsAnother) {
  const GptRun means = train("llama_grouped", 2, 3, {});
  const double want = golden_.at("runs").at("llama_grouped").at("loss")[0];
  EXPECT_GT(std::abs(means.loss[0] - want), 1e-3 * want);
  EXPECT_GT(std::abs(means.loss[0] - train("llama_grouped", 2, 1, {}).loss[0]), 1e-3 * want);
}

TEST_F(Documents, StepsThatAreMadeAgainChangeNothing) {
  TrainConfig guarded = over_tokens();
  guarded.train.spike_factor = 2;
  guarded.train.verify_every = 2;
  const GptRun run = train("llama_grouped", 2, 3, guarded);
  EXPECT_EQ(run.params_sha256, train("llama_grouped", 2, 3, over_tokens()).params_sha256);
  EXPECT_EQ(run.records[1].at("replayed"), kReplayedEqual);
}

}  // namespace
}  // namespace tessera::tools

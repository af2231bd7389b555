// Small models of Llama's kind and of GPT-NeoX train as they do in Hugging Face transformers, on
// any ranks, and what is saved is what was loaded: see tests/golden/make_llama_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/io/safetensors.h"
#include "shard/placement.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/train/family_golden.h"
#include "tools/models/family.h"

namespace tessera::tools {
namespace {

using namespace family_golden;  // NOLINT: the harness
using testing::GptRun;

TrainConfig on_cpu() {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.train.steps = 0;
  return config;
}

class FamilyGolden : public ::testing::TestWithParam<GoldenModel> {};

TEST_P(FamilyGolden, TrainsAsTransformersDoes) {
  const nlohmann::json want = GetParam().run();
  for (const std::int64_t ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    const GptRun run = train(GetParam(), ranks, on_cpu());
    ASSERT_EQ(run.loss.size(), want.at("loss").size());
    expect_near(run.loss, want.at("loss"), 1e-5, "loss");
    expect_near(run.grad_norm, want.at("grad_norm"), 1e-4, "gradient norm");
    // By names of files: queries, keys and values, one parameter here, are three there.
    const auto model = read_model_config(GetParam().path()).make();
    std::set<std::string> seen;
    for (const engine::Parameter* p : parameters_of(*model)) {
      const std::vector<float>& values = run.parameters.at(p->name);
      std::size_t at = 0;
      for (const engine::TensorSpec& tensor : model->file_tensors(*p)) {
        const ModelLayout layout = model->layout();
        const std::string name = (tensor.name == layout.head ? "" : layout.prefix) + tensor.name;
        double squares = 0, product = 0;
        for (std::int64_t i = 0; i < engine::numel(tensor.shape); ++i, ++at) {
          const double value = values.at(at);
          squares += value * value;
          product += value * std::cos(static_cast<double>(i));
        }
        const nlohmann::json& final = want.at("final").at(name);
        const double norm = final[0];
        EXPECT_NEAR(std::sqrt(squares), norm, 1e-5 * norm) << name;
        EXPECT_NEAR(product, final[1].get<double>(), 1e-5 * norm) << name;
        seen.insert(name);
      }
      EXPECT_EQ(at, values.size()) << p->name;
    }
    EXPECT_EQ(seen.size(), want.at("final").size());
  }
}

TEST_P(FamilyGolden, GivesTheLogitsOfTransformers) {
  const nlohmann::json want = GetParam().run().at("logits");
  const ModelConfig config = read_model_config(GetParam().path());
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    const auto compute = engine::Stream::inline_cpu("compute");
    engine::Tape tape(memory, compute);
    const auto model = config.make();
    shard::Fsdp fsdp(world, memory, compute, model->blocks(), model->root(), {});
    load_model(fsdp, *model, GetParam().path());
    const TokenDataset data(TokenFile(GetParam().tokens()), {.seq = 12, .vocab = config.vocab});
    std::vector<std::int32_t> tokens(12), targets(12);
    data.batch(0, 1, tokens, targets);
    const engine::Tensor logits =
        model->next_token_logits(tape, engine::Tensor::from<std::int32_t>(memory, {1, 12}, tokens));
    ASSERT_EQ(logits.numel(), std::ssize(want));
    for (std::size_t v = 0; v < want.size(); ++v) {
      EXPECT_NEAR(logits.span<float>()[v], want[v].get<double>(), 1e-5) << v;
    }
  });
}

// As strategies, recompute and packing are no part of the arithmetic.
TEST_P(FamilyGolden, HasEqualBitsHoweverItIsTrained) {
  const std::string sha256 = train(GetParam(), 2, on_cpu()).params_sha256;
  for (const char* strategy : {"ddp", "zero1", "shard_grad_op"}) {
    TrainConfig config = on_cpu();
    config.parallel.strategy = strategy;
    EXPECT_EQ(train(GetParam(), 2, config).params_sha256, sha256) << strategy;
  }
  TrainConfig recompute = on_cpu();
  recompute.train.recompute = true;
  EXPECT_EQ(train(GetParam(), 2, recompute).params_sha256, sha256);
}

// Micro-batches of a sequence each, under every strategy. On six ranks hybrids have two replicas.
TEST_P(FamilyGolden, HasEqualBitsHoweverRanksShareMicroBatches) {
  const auto bits = [](std::int64_t ranks, const std::string& strategy) {
    TrainConfig config = on_cpu();
    config.train.steps = 4;
    config.train.accum = 6 / ranks;
    config.parallel.strategy = strategy;
    return train(GetParam(), ranks, config).params_sha256;
  };
  const std::string sha256 = bits(1, "zero3");
  std::int64_t few = 2;
  for (const std::string& strategy : shard::Placement::preset_names()) {
    const std::int64_t ranks = shard::Placement::preset(strategy).is_hybrid() ? 6 : few;
    EXPECT_EQ(bits(ranks, strategy), sha256) << strategy << " on " << ranks << " ranks";
    few = 5 - few;
  }
}

TEST_P(FamilyGolden, IsSavedAsItWasLoaded) {
  const testing::TempFolder folder;
  const ModelConfig config = read_model_config(GetParam().path());
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    const auto model = config.make();
    shard::Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), model->blocks(),
                     model->root(), {});
    load_model(fsdp, *model, GetParam().path());
    save_model(fsdp, *model, folder.path(), world);
  });
  const engine::SafetensorsFile before(GetParam().path() + "/model.safetensors"),
      after(folder / "model.safetensors");
  EXPECT_EQ(after.tensors().size(), before.tensors().size());
  for (const engine::TensorInfo& tensor : before.tensors()) {
    const std::string& name = tensor.name;
    const engine::TensorInfo* saved = after.find(name);
    ASSERT_NE(saved, nullptr) << name;
    EXPECT_EQ(saved->shape, tensor.shape) << name;
    std::vector<float> old_values(std::size_t(engine::numel(tensor.shape))),
        new_values(old_values.size());
    before.read(tensor, 0, old_values);
    after.read(*saved, 0, new_values);
    EXPECT_EQ(new_values, old_values) << name;
  }
  EXPECT_EQ(to_text(read_model_config(folder.path())), to_text(config));
  // What checkpoints say of it makes it again.
  EXPECT_EQ(to_text(parse_model_text(to_text(config), "text")), to_text(config));
}

INSTANTIATE_TEST_SUITE_P(Models, FamilyGolden, ::testing::ValuesIn(models()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tessera::tools

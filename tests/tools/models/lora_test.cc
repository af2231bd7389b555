// Low-rank adapters: which modules get them, how they begin, and what they add, by hand.
#include "tools/models/lora.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "tests/testing/errors.h"
#include "tests/tools/testing/tiny_family.h"
#include "tools/models/family.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Tensor;
using testing::error_of;
using testing::has;
using Names = std::vector<std::string>;

std::vector<LinearModule> modules_of(const char* preset) {
  return preset_config(preset).make()->linear_modules();
}

TEST(Lora, TargetsAreNamedAsFilesNameThem) {
  const auto gpt = modules_of("gpt2"), llama = modules_of("smollm2-135m"),
             neox = modules_of("pythia-160m");
  // What PEFT takes by itself.
  EXPECT_EQ(lora_targets(gpt, {}), Names{"c_attn"});
  EXPECT_EQ(lora_targets(llama, {}), (Names{"q_proj", "v_proj"}));
  EXPECT_EQ(lora_targets(neox, {}), Names{"query_key_value"});
  const Names all = {"all-linear"};
  EXPECT_EQ(lora_targets(gpt, all), (Names{"c_attn", "c_proj", "c_fc"}));
  EXPECT_EQ(lora_targets(llama, all),
            (Names{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}));
  EXPECT_EQ(lora_targets(neox, all),
            (Names{"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}));
  // One name is two modules of GPT-2's, each of which has a name of its own.
  EXPECT_EQ(lora_targets(gpt, Names{"mlp.c_proj"}), Names{"mlp.c_proj"});
  EXPECT_EQ(lora_targets(gpt, Names{"mlp.c_proj", "attn.c_proj"}), Names{"c_proj"});
  // Order and repetition say nothing.
  EXPECT_EQ(lora_targets(llama, Names{"down_proj", "q_proj", "q_proj"}),
            (Names{"q_proj", "down_proj"}));
  EXPECT_EQ(parse_lora_targets("a,b.c"), (Names{"a", "b.c"}));
  EXPECT_EQ(parse_lora_targets(""), Names());
  for (const char* wrong : {"proj", "", "layers.0.mlp.up_proj", "lm_head"}) {
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                lora_targets(llama, Names{"q_proj", wrong});
              }),
              std::string("[lora] expected targets of q_proj, k_proj, v_proj, o_proj, gate_proj, "
                          "up_proj, down_proj, or all-linear, got '") +
                  wrong + "' (lora.targets)");
  }
}

TEST(Lora, AdaptersAloneAreTrainedAndBeginAsThoseOfPeft) {
  ModelConfig config = preset_config("smollm2-135m");
  config.layers = 2;
  const std::int64_t whole = config.num_parameters();
  EXPECT_EQ(config.num_trained(), whole);
  config.lora = {.rank = 3, .targets = {"k_proj", "down_proj"}};
  const auto model = config.make();
  std::int64_t numel = 0;
  Names names;
  for (const engine::Parameter* p : parameters_of(*model)) {
    EXPECT_EQ(p->trainable, is_adapter(*p)) << p->name;
    if (!is_adapter(*p)) continue;
    names.push_back(p->name);
    numel += p->shape.numel();
  }
  EXPECT_EQ(
      names,
      (Names{"layers.0.self_attn.k_proj.lora_A.weight", "layers.0.self_attn.k_proj.lora_B.weight",
             "layers.0.mlp.down_proj.lora_A.weight", "layers.0.mlp.down_proj.lora_B.weight",
             "layers.1.self_attn.k_proj.lora_A.weight", "layers.1.self_attn.k_proj.lora_B.weight",
             "layers.1.mlp.down_proj.lora_A.weight", "layers.1.mlp.down_proj.lora_B.weight"}));
  EXPECT_EQ(numel, 2 * 3 * ((576 + 192) + (1536 + 576)));
  EXPECT_EQ(config.num_trained(), numel);
  EXPECT_EQ(config.num_parameters(), whole + numel);
  // Uniform in [-1, 1] / sqrt(in), as kaiming_uniform_(a=sqrt(5)); B is 0.
  const engine::Block& layer = *model->blocks()[0];
  const auto of = [&](const std::string& name) -> const engine::Parameter& {
    return **std::ranges::find(layer.parameters, name, &engine::Parameter::name);
  };
  const engine::Parameter& a = of("layers.0.mlp.down_proj.lora_A.weight");
  EXPECT_EQ(a.shape, (engine::Shape{3, 1536}));
  EXPECT_EQ(a.init.kind, engine::Init::Kind::kUniform);
  EXPECT_FLOAT_EQ(a.init.scale, 1 / std::sqrt(1536.0f));
  const engine::Parameter& b = of("layers.0.mlp.down_proj.lora_B.weight");
  EXPECT_EQ(b.shape, (engine::Shape{576, 3}));
  EXPECT_EQ(b.init.kind, engine::Init::Kind::kZeros);
}

TEST(Lora, WhatIsFrozenHasNoGradientToBeComputed) {
  ModelConfig config = preset_config("gpt2");
  const double t = 100, layers = 12, dim = 768;
  const double linears = 2 * t * layers * 12 * dim * dim, head = 2 * t * dim * 50257;
  const double attention = layers * 4 * dim * t * (t + 1) / 2;
  EXPECT_DOUBLE_EQ(config.train_flops(100), 3 * (linears + head + attention));
  config.lora = {.rank = 4, .targets = {"c_attn"}};
  EXPECT_DOUBLE_EQ(config.train_flops(100),
                   2 * (linears + head) + 3 * attention + 6 * t * layers * 4 * (dim + 3 * dim));
}

TEST(Lora, WhatIsOutOfRangeIsRefused) {
  const auto refused = [](const LoraOptions& options) {
    ModelConfig config = preset_config("small");
    config.lora = options;
    return error_of<InvalidArgument>([&] { config.make(); });
  };
  EXPECT_TRUE(has(refused({.rank = 1 << 17}), {"lora.rank in [1, 65536], got 131072"}));
  EXPECT_TRUE(has(refused({.rank = 1, .alpha = 0}), {"lora.alpha above 0, got 0"}));
  EXPECT_TRUE(has(refused({.rank = 1, .dropout = 1}), {"lora.dropout in [0, 1), got 1"}));
  ModelConfig tiny = preset_config("tiny", testing::families_and_tiny());
  tiny.lora.rank = 1;
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { tiny.make(); }),
                  {"a model to which adapters can be added, got another (lora.rank)"}));
}

// Two packed modules and one between them without an adapter, beside y and x of two tokens.
TEST(Lora, AddsScaleTimesBTimesAOfWhatWasNotDropped) {
  const std::vector<LinearModule> modules = {{"m.q", 2, 3}, {"m.k", 1, 3}, {"m.v", 2, 3}};
  const Pass pass{.training = false};
  for (const bool use_rslora : {false, true}) {
    engine::Block block{"layer"};
    std::vector<engine::Block*> layers = {&block};
    Lora lora({.rank = 4, .alpha = 6, .use_rslora = use_rslora, .targets = {"q", "v"}}, modules,
              layers);
    EXPECT_TRUE(lora.has({"m.k", "m.v"}));
    EXPECT_FALSE(lora.has({"m.k"}));
    const double scale = use_rslora ? 3 : 1.5;
    EXPECT_DOUBLE_EQ(lora.options().scale(), scale);
    const engine::Memory memory;
    engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
    std::vector<std::vector<float>> values;  // A and B of q, A and B of v
    for (engine::Parameter* p : block.parameters) {
      std::vector<float> v(static_cast<std::size_t>(p->shape.numel()));
      for (std::size_t i = 0; i < v.size(); ++i)
        v[i] = std::sin(static_cast<float>(i + 5 * values.size()));
      p->value = Tensor::from<float>(memory, p->shape, v, p->name);
      values.push_back(v);
    }
    std::vector<float> x(6), y(10);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::cos(static_cast<float>(i));
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(i);
    const Tensor got = tape.no_grad([&] {
      return tape.region(block, [&] {
        return lora.add_to(tape, 0, {"m.q", "m.k", "m.v"},
                           Tensor::from<float>(memory, {1, 2, 3}, x, "x"),
                           Tensor::from<float>(memory, {1, 2, 5}, y, "y"), pass);
      });
    });
    ASSERT_EQ(got.shape(), (engine::Shape{1, 2, 5}));
    for (std::size_t t = 0; t < 2; ++t) {
      for (std::size_t o = 0; o < 5; ++o) {
        double want = y[5 * t + o];
        if (o != 2) {
          const std::size_t first = o < 2 ? 0 : 2, row = o < 2 ? o : o - 3;
          for (std::size_t r = 0; r < 4; ++r) {
            for (std::size_t i = 0; i < 3; ++i) {
              want +=
                  scale * values[first + 1][4 * row + r] * values[first][3 * r + i] * x[3 * t + i];
            }
          }
        }
        EXPECT_NEAR(got.span<float>()[5 * t + o], want, 1e-5) << t << " " << o;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::tools

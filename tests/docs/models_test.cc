// docs/models.md, line by line: what it shows is this program.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/tape.h"
#include "ops/add.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/gelu.h"
#include "ops/linear.h"
#include "ops/scale.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/summon.h"
#include "tests/docs/shown.h"

namespace tessera {
namespace {

using engine::Parameter;
using engine::Tensor;

constexpr std::int64_t kVocab = 12, kWidth = 8;

constexpr float kAlpha = 4;
constexpr std::int64_t kRank = 2;

// A linear layer, frozen but for what is added to it.
struct Layer {
  explicit Layer(const std::string& name)
      : weight{name + ".w", {kWidth, kWidth}, engine::Init::normal(0.3f), /*trainable=*/false},
        a{name + ".a", {kWidth, kRank}, engine::Init::normal(0.3f)},
        b{name + ".b", {kRank, kWidth}, engine::Init::zeros()},
        block{name, {&weight, &a, &b}},
        parameters{&weight, &a, &b} {}

  Tensor adapted(engine::Tape& tape, const Tensor& h) {
    constexpr float alpha = kAlpha, r = kRank;
    Layer& l = *this;
    const Tensor base = ops::linear(tape, h, l.weight, nullptr);
    const Tensor low = ops::linear(tape, ops::linear(tape, h, l.a, nullptr), l.b, nullptr);
    return ops::add(tape, base, ops::scale(tape, low, alpha / r));
  }

  Parameter weight, a, b;
  engine::Block block;
  std::vector<Parameter*> parameters;
};

struct Embedding {
  Parameter table = {"table", {kVocab, kWidth}, engine::Init::normal(0.3f)};
  engine::Block block = {"embedding", {&table}};
};

struct Head {
  Parameter bias = {"head.bias", {kWidth}, engine::Init::zeros()};
  Parameter weight = {"head.w", {kWidth, kWidth}, engine::Init::normal(0.3f)};
  engine::Block block = {"head", {&weight, &bias}};
};

// An embedding, a layer, and a head whose last matrix is that of the embedding.
struct Model {
  Embedding embedding;
  Layer layer{"layer"};
  Head head;

  std::vector<engine::Block*> blocks() { return {&embedding.block, &layer.block, &head.block}; }

  Tensor logits(engine::Tape& tape, const Tensor& tokens) {
    Tensor x =
        tape.region(embedding.block, [&] { return ops::embedding(tape, tokens, embedding.table); });
    x = tape.region(layer.block, [&] { return layer.adapted(tape, x); });
    // clang-format off
    return
    tape.region(head.block, [&] {
      Tensor h = ops::gelu(tape, ops::linear(tape, x, head.weight, &head.bias));
      return tape.region(embedding.block, [&] { return ops::linear(tape, h, embedding.table, nullptr, ops::WeightLayout::kOutIn); });
    });
    // clang-format on
  }
};

// What all ranks train on.
struct Rank {
  explicit Rank(comm::ProcessGroup& world)
      : fsdp(world, memory, compute, model.blocks(), nullptr,
             {.placement = shard::Placement::preset("zero3")}) {}

  Tensor loss() {
    const auto of = [&](const std::vector<std::int32_t>& values) {
      return Tensor::from<std::int32_t>(memory, {4}, values, "tokens");
    };
    return ops::cross_entropy(tape, model.logits(tape, of({1, 5, 2, 7})), of({5, 2, 7, 1}));
  }
  float step() {
    fsdp.begin_step();
    const Tensor of_step = loss();
    tape.backward(of_step);
    optimizer.step(0.03, fsdp.finish_step(), 0);
    return of_step.item();
  }

  engine::Stream compute = engine::Stream::inline_cpu("compute");
  engine::Memory memory;
  engine::Tape tape{memory, compute};
  Model model;
  shard::Fsdp fsdp;
  shard::AdamW optimizer{fsdp, {}};
};

TEST(ModelsPage, TiesAdaptsFreezesAndMerges) {
  comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
    Rank rank(world);
    shard::Fsdp& fsdp = rank.fsdp;
    Layer& layer = rank.model.layer;
    const auto values_of = [&](const Parameter& p) { return fsdp.full_parameter(p); };
    const auto frozen = values_of(layer.weight), a = values_of(layer.a);
    const float first = rank.step();
    float last = first;
    for (int i = 0; i < 20; ++i) last = rank.step();
    EXPECT_LT(last, 0.7f * first);
    EXPECT_EQ(values_of(layer.weight), frozen);
    const auto adapted = values_of(layer.a);
    EXPECT_NE(adapted, a);

    for (Parameter* p : layer.parameters) p->trainable = false;
    fsdp.trainable_changed();
    last = rank.step();
    EXPECT_EQ(values_of(layer.a), adapted);

    // The adapter becomes part of the matrix.
    const auto b = values_of(layer.b);
    const auto before = rank.tape.no_grad([&] { return rank.loss().item(); });
    const auto merge = [&](const Tensor& weight) {
      auto w = engine::to_vector<float>(weight);
      for (std::size_t i = 0; i < kWidth; ++i) {
        for (std::size_t k = 0; k < kWidth; ++k) {
          for (std::size_t j = 0; j < kRank; ++j)
            w[i * kWidth + k] += kAlpha / kRank * adapted[kRank * i + j] * b[j * kWidth + k];
        }
      }
      std::copy(w.begin(), w.end(), weight.data<float>());
    };
    // clang-format off
    summon(fsdp, {&layer.weight}, [&](const std::vector<Tensor>& whole) { merge(whole[0]); }, {.write_back = true});
    // clang-format on
    fsdp.load(layer.b, std::vector<float>(kRank * kWidth, 0));
    EXPECT_NE(values_of(layer.weight), frozen);
    EXPECT_NEAR(rank.tape.no_grad([&] { return rank.loss().item(); }), before, 1e-5);
  });
}

TEST(ModelsPage, AGeneratorLearnsThroughWhatIsFrozen) {
  comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
    const auto compute = engine::Stream::inline_cpu("compute");
    const engine::Memory memory;
    engine::Tape tape(memory, compute);
    Layer made("made"), judge("judge");
    made.weight.trainable = true;
    const shard::FsdpOptions options{.placement = shard::Placement::preset("zero3")};
    shard::Fsdp fsdp_of_generator(world, memory, compute, {&made.block}, nullptr, options);
    shard::Fsdp fsdp_of_discriminator(world, memory, compute, {&judge.block}, nullptr, options);
    const auto generator = [&](engine::Tape& t, const Tensor& x) {
      return t.region(made.block, [&] { return made.adapted(t, x); });
    };
    const auto score = [&](engine::Tape& t, const Tensor& x) {
      return ops::sum(t, t.region(judge.block, [&] { return judge.adapted(t, x); }));
    };
    const Tensor noise =
        Tensor::from<float>(memory, {1, kWidth}, std::vector<float>(kWidth, 0.5f), "noise");
    fsdp_of_generator.begin_step();
    // clang-format off
    const Tensor fake = generator(tape, noise);
    tape.backward(tape.frozen([&] { return score(tape, fake); }));
    fsdp_of_generator.finish_step();
    // clang-format on
    double sum = 0;
    for (const float g : fsdp_of_generator.full_gradient(made.weight)) sum += std::abs(g);
    EXPECT_GT(sum, 0);
  });
}

TEST(ModelsPage, GivesGradientsOfInputs) {
  const auto compute = engine::Stream::inline_cpu("compute");
  const engine::Memory memory;
  engine::Tape tape(memory, compute);
  const Tensor x = Tensor::from<float>(memory, {2}, std::vector<float>{1, 2}, "x");
  tape.watch(x);
  const Tensor loss = ops::sum(tape, ops::scale(tape, x, 3));
  tape.backward(loss);
  const Tensor dx = tape.grad(x);
  EXPECT_EQ(engine::to_vector<float>(dx), (std::vector<float>{3, 3}));
}

TEST(ModelsPage, ShowsWhatIsHere) {
  testing::expect_shown("docs/models.md", "tests/docs/models_test.cc", 14);
}

}  // namespace
}  // namespace tessera

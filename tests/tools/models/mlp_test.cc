// The multi-layer perceptron against a plain reference in double.
#include "tools/models/mlp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/philox.h"
#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::RandomStream;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using testing::error_of;
using testing::has;

constexpr std::int64_t kBatch = 3;

std::vector<float> random_values(std::int64_t numel, const std::string& name, float scale) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  const RandomStream random{5, engine::fnv1a(name)};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = scale * random.normal(i);
  return values;
}

struct RandomModel {
  Memory memory;
  Tape tape{memory, engine::Stream::inline_cpu("compute")};
  Mlp mlp;
  std::vector<std::vector<float>> weights, biases;

  explicit RandomModel(const MlpConfig& config) : mlp(config) {
    for (const engine::Block* block : mlp.blocks()) {
      for (Parameter* p : block->parameters) {
        const bool is_weight = p->shape.rank() == 2;
        auto& values = is_weight ? weights : biases;
        values.push_back(random_values(p->shape.numel(), p->name, is_weight ? 0.7f : 0.5f));
        p->value = Tensor::from<float>(memory, p->shape, values.back(), p->name);
        p->grad = Tensor::zeros(memory, p->shape, engine::DType::kF32, p->name);
      }
    }
  }
};

/// Logits (B, classes).
std::vector<double> reference_logits(const RandomModel& model, const std::vector<float>& x) {
  std::vector<double> h(x.begin(), x.end());
  for (std::size_t layer = 0; layer < model.weights.size(); ++layer) {
    const auto &w = model.weights[layer], &bias = model.biases[layer];
    const std::size_t in = h.size() / kBatch, out = bias.size();
    std::vector<double> y;
    for (std::size_t row = 0; row < kBatch; ++row) {
      for (std::size_t o = 0; o < out; ++o) {
        double sum = bias[o];
        for (std::size_t i = 0; i < in; ++i) sum += h[row * in + i] * w[i * out + o];
        const bool is_last = layer + 1 == model.weights.size();
        y.push_back(is_last ? sum : std::max(sum, 0.0));
      }
    }
    h = y;
  }
  return h;
}

TEST(Mlp, ComputesLogitsAndLoss) {
  for (const std::int64_t layers : {1, 2, 4}) {
    RandomModel model({.inputs = 5, .hidden = 6, .layers = layers, .classes = 4});
    ASSERT_EQ(std::ssize(model.mlp.blocks()), layers);
    const std::vector<float> x = random_values(kBatch * 5, "x", 1);
    const std::vector<std::int32_t> targets = {3, 0, 2};
    const Tensor input = Tensor::from<float>(model.memory, {kBatch, 5}, x, "x");
    const Tensor labels = Tensor::from<std::int32_t>(model.memory, {kBatch}, targets, "labels");
    const std::vector<double> expected = reference_logits(model, x);
    ASSERT_LT(*std::ranges::min_element(expected), 0);  // so that a last ReLU would show
    const Tensor logits = model.mlp.logits(model.tape, input);
    ASSERT_EQ(logits.shape(), (Shape{kBatch, 4}));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(logits.span<float>()[i], expected[i], 1e-5) << layers << ": " << i;
    }
    double loss = 0;
    for (std::size_t row = 0; row < kBatch; ++row) {
      const auto scores = std::span(expected).subspan(row * 4, 4);
      double total = 0;
      for (const double s : scores) total += std::exp(s);
      loss += (std::log(total) - scores[static_cast<std::size_t>(targets[row])]) / kBatch;
    }
    for (const bool recompute : {false, true}) {
      EXPECT_NEAR(model.mlp.loss(model.tape, {input, labels}, {.recompute = recompute}).item(),
                  loss, 1e-5);
    }
    model.tape.clear();
  }
}

TEST(Mlp, RecomputeFindsTheSameGradients) {
  std::vector<std::vector<std::vector<float>>> grads;
  std::vector<std::size_t> num_entries;
  for (const Recompute recompute : {Recompute(), Recompute::first(2), Recompute(true)}) {
    RandomModel model({.inputs = 5, .hidden = 6, .layers = 3, .classes = 4});
    const Tensor x = Tensor::from<float>(model.memory, {kBatch, 5}, random_values(15, "x", 1), "x");
    const std::vector<std::int32_t> targets = {3, 0, 2};
    const Tensor labels = Tensor::from<std::int32_t>(model.memory, {kBatch}, targets, "labels");
    const Tensor loss = model.mlp.loss(model.tape, {x, labels}, {.recompute = recompute});
    num_entries.push_back(model.tape.num_entries());
    model.tape.backward(loss);
    auto& of_pass = grads.emplace_back();
    for (const engine::Block* block : model.mlp.blocks()) {
      for (const Parameter* p : block->parameters) {
        const auto grad = p->grad.span<float>();
        EXPECT_GT(*std::ranges::max_element(grad), 0) << p->name;
        of_pass.emplace_back(grad.begin(), grad.end());
      }
    }
  }
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_EQ(grads[0], grads[2]);
  EXPECT_GT(num_entries[0], num_entries[1]);
  EXPECT_GE(num_entries[1], num_entries[2]);
}

TEST(Mlp, StartsWithTheVarianceOfItsInputs) {
  Mlp mlp({.inputs = 50, .hidden = 200, .layers = 3, .classes = 100});
  const std::vector<Shape> shapes = {{50, 200}, {200, 200}, {200, 100}};
  for (std::size_t layer = 0; layer < 3; ++layer) {
    const auto& parameters = mlp.blocks()[layer]->parameters;
    ASSERT_EQ(parameters.size(), 2u);
    const Parameter &weight = *parameters[0], &bias = *parameters[1];
    EXPECT_EQ(weight.name, "fc." + std::to_string(layer) + ".weight");
    EXPECT_EQ(weight.shape, shapes[layer]);
    EXPECT_EQ(bias.shape, (Shape{shapes[layer].dim(1)}));
    std::vector<float> value(static_cast<std::size_t>(weight.shape.numel()));
    weight.init.write(value.data(), 0, weight.shape.numel(), weight.name, 1);
    double squares = 0;
    for (const double v : value) squares += v * v;
    const double inputs = static_cast<double>(weight.shape.dim(0));
    EXPECT_NEAR(squares / static_cast<double>(value.size()) * inputs, 2, 0.1) << layer;
    EXPECT_EQ(bias.init.kind, engine::Init::Kind::kZeros);
  }
}

TEST(Mlp, RefusesSizesBelowOne) {
  for (const MlpConfig& config : {MlpConfig{.inputs = 0}, MlpConfig{.hidden = 0},
                                  MlpConfig{.layers = 0}, MlpConfig{.classes = 0}}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { Mlp{config}; }), {"at least 1", " 0"}));
  }
}

TEST(Mlp, RefusesABatchThatIsNotItsOwn) {
  RandomModel model({.inputs = 5, .hidden = 6, .layers = 2, .classes = 4});
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { model.mlp.loss(model.tape, {}, {}); }),
                  {"[mlp]", "inputs and targets", "0 tensors"}));
}

TEST(Mlp, CountsTheOperationsOfItsProducts) {
  const auto flops = [](std::int64_t layers) {
    return MlpConfig{.inputs = 5, .hidden = 3, .layers = layers, .classes = 2}.train_flops();
  };
  EXPECT_EQ(flops(1), 2 * 20);  // forward and the weight's gradient
  EXPECT_EQ(flops(2), 2 * 30 + 3 * 12);
  EXPECT_EQ(flops(4), 2 * 30 + 3 * (2 * 18 + 12));
}

}  // namespace
}  // namespace tessera::tools

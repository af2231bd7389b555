// docs/ops.md, line by line: what it shows is this program, with the shapes that it says.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "ops/add.h"
#include "ops/attention.h"
#include "ops/bmm.h"
#include "ops/cross_entropy.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/dims/reduce.h"
#include "ops/dims/slice.h"
#include "ops/dispatch.h"
#include "ops/dot_product_attention.h"
#include "ops/dropout.h"
#include "ops/elementwise/cast.h"
#include "ops/elementwise/div.h"
#include "ops/elementwise/unary.h"
#include "ops/elementwise/where.h"
#include "ops/embedding.h"
#include "ops/gelu.h"
#include "ops/index/gather.h"
#include "ops/linear.h"
#include "ops/losses/losses.h"
#include "ops/losses/weighted_cross_entropy.h"
#include "ops/mul.h"
#include "ops/parameter.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/route.h"
#include "ops/scale.h"
#include "ops/softmax/softmax.h"
#include "ops/sum.h"
#include "ops/swiglu.h"
#include "tests/docs/shown.h"

namespace tessera {
namespace {

using engine::DType;
using engine::Parameter;
using engine::Shape;
using engine::Tensor;

constexpr std::int64_t B = 2, T = 4, C = 8, V = 5;
constexpr std::int64_t H = 4, KV = 2, D = 2;

class OpsPage : public ::testing::Test {
 protected:
  // Of the standard normal distribution, and wanted: its gradient is asked for.
  Tensor random(const Shape& shape) {
    const Tensor x = data(shape);
    tape.watch(x);
    wanted_.push_back(x);
    return x;
  }
  Tensor data(const Shape& shape) {
    const Tensor x = Tensor::empty(memory, shape, DType::kF32, "x");
    engine::Init::normal(1).write(x.data<float>(), 0, x.numel(), "x", ++num_made_);
    return x;
  }
  Tensor integers(const Shape& shape, std::int64_t end) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<std::int32_t>((3 * i + 1) % static_cast<std::size_t>(end));
    return Tensor::from<std::int32_t>(memory, shape, values, "integers");
  }
  Parameter& parameter(const Shape& shape) {
    const std::string name = "p" + std::to_string(parameters_.size());
    parameters_.emplace_back(
        new Parameter{.name = name, .shape = shape, .init = engine::Init::normal(0.5f)});
    engine::materialize({parameters_.back().get()}, memory, 1);
    return *parameters_.back();
  }
  // Every gradient is there, and not zero everywhere.
  void expect_gradients(const Tensor& y) {
    const Tensor loss = y.shape() == Shape{} ? y : ops::sum(tape, ops::mul(tape, y, y));
    tape.backward(loss);
    for (const Tensor& x : wanted_) {
      const Tensor dx = tape.grad(x);
      ASSERT_TRUE(dx.defined());
      EXPECT_GT(size_of(engine::to_vector<float>(dx)), 0) << x.shape().str();
    }
    for (const auto& p : parameters_)
      EXPECT_GT(size_of(engine::to_vector<float>(p->grad)), 0) << p->name;
  }
  static double size_of(const std::vector<float>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0,
                           [](double sum, float v) { return sum + std::abs(v); });
  }

  engine::Memory memory;
  engine::Tape tape{memory, engine::Stream::inline_cpu("compute")};

 private:
  std::vector<Tensor> wanted_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::uint64_t num_made_ = 0;
};

// clang-format off

TEST_F(OpsPage, Begins) {
  const Tensor x = random({B, T, C}), target = data({B, T, 4 * C});
  Parameter &w = parameter({C, 4 * C}), &b = parameter({4 * C});
  const Tensor h = ops::linear(tape, x, w, &b);
  const Tensor loss = ops::mse(tape, ops::tanh(tape, h), target);
  EXPECT_EQ(h.shape(), (Shape{B, T, 4 * C}));
  EXPECT_EQ(loss.shape(), Shape{});
  expect_gradients(loss);
}

TEST_F(OpsPage, Products) {
  const Tensor tokens = integers({B, T}, V);
  Parameter &table = parameter({V, C}), &w_qkv = parameter({C, (H + 2 * KV) * D});
  Parameter &w_in = parameter({H * D, 4 * C}), &b_in = parameter({4 * C});
  Parameter &w_out = parameter({4 * C, C}), &b_out = parameter({C});
  Tensor x = ops::embedding(tape, tokens, table);
  EXPECT_EQ(x.shape(), (Shape{B, T, C}));
  x = ops::linear(tape, x, w_qkv, nullptr);
  EXPECT_EQ(x.shape(), (Shape{B, T, (H + 2 * KV) * D}));
  x = ops::rope(tape, x, {.head_size = D, .num_heads = H + KV});
  x = ops::attention(tape, x, {.num_heads = H, .num_kv_heads = KV});
  EXPECT_EQ(x.shape(), (Shape{B, T, H * D}));
  x = ops::gelu_mlp(tape, x, w_in, b_in, w_out, &b_out);
  EXPECT_EQ(x.shape(), (Shape{B, T, C}));
  expect_gradients(x);
}

TEST_F(OpsPage, ProductsOfTensors) {
  constexpr std::int64_t S = 6, E = 3, M = 3, K = 4, N = 2, window = 2;
  const Tensor q = random({B, T, H, D}), k = random({B, S, KV, D}), v = random({B, S, KV, E});
  const Tensor a = random({B, M, K}), b = random({B, N, K});
  const Tensor mask = ops::causal_mask(tape, T, S, q.dtype(), window);
  const Tensor y = ops::dot_product_attention(tape, q, k, v, {.mask = mask});
  const Tensor products = ops::bmm(tape, a, b, {.transpose_b = true});
  EXPECT_EQ(mask.shape(), (Shape{T, S}));
  EXPECT_EQ(y.shape(), (Shape{B, T, H, E}));
  EXPECT_EQ(products.shape(), (Shape{B, M, N}));
  const auto sum = [&](const Tensor& t) { return ops::sum(tape, ops::mul(tape, t, t)); };
  expect_gradients(ops::add(tape, sum(y), sum(products)));
}

TEST_F(OpsPage, ElementByElement) {
  constexpr std::uint64_t seed = 1, step = 3, first_index = 0;
  const Tensor x = random({B, T, C});
  const Tensor condition = ops::clamp(tape, data({B, T, C}), 0, 1);
  Parameter &w_gate = parameter({C, C}), &w_up = parameter({C, C});
  const Tensor gated = ops::swiglu(tape, ops::linear(tape, x, w_gate, nullptr), ops::linear(tape, x, w_up, nullptr));
  const Tensor chosen = ops::where(tape, condition, gated, ops::scale(tape, gated, 0.5f));
  const Tensor dropped = ops::dropout(tape, chosen, 0.1f, {seed, engine::fnv1a("h.0.drop") ^ step}, first_index);
  const Tensor half = ops::cast(tape, dropped, DType::kBF16);
  EXPECT_EQ(half.shape(), x.shape());
  EXPECT_EQ(half.dtype(), DType::kBF16);
  expect_gradients(ops::sum(tape, half));
}

TEST_F(OpsPage, AlongDimensions) {
  const Tensor x = random({B, T, C}), logits = random({B, T, V}), tokens = integers({B, T}, V);
  Parameter& w = parameter({C});
  const Tensor normed = ops::rmsnorm(tape, x, w);
  const Tensor log_probs = ops::log_softmax(tape, logits);
  const Tensor taken = ops::gather(tape, log_probs, tokens);
  const Tensor last = ops::slice(tape, normed, 1, T - 1, 1).reshape({B, C});
  EXPECT_EQ(normed.shape(), x.shape());
  EXPECT_EQ(log_probs.shape(), logits.shape());
  EXPECT_EQ(taken.shape(), tokens.shape());
  const auto losses = engine::to_vector<float>(ops::cross_entropy_rows(tape, logits, tokens));
  const auto values = engine::to_vector<float>(taken);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], -losses[i], 1e-6);
  expect_gradients(ops::add(tape, ops::sum(tape, taken), ops::sum(tape, ops::mul(tape, last, last))));
}

TEST_F(OpsPage, MeansOfWhatAMaskLeaves) {
  const Tensor x = random({B, T, C});
  const Tensor mask = Tensor::from<float>(memory, {B, T}, std::vector<float>{1, 0, 1, 1, 0, 1, 0, 0}, "mask");
  const Tensor mask_of_all = ops::broadcast(tape, mask.reshape({B, T, 1}), x.shape());
  const Tensor sums = ops::sum(tape, ops::mul(tape, x, mask_of_all), 1);
  const Tensor counts = ops::sum(tape, mask, 1);
  const Tensor means = ops::div(tape, sums, ops::broadcast(tape, counts.reshape({B, 1}), sums.shape()));
  EXPECT_EQ(sums.shape(), (Shape{B, C}));
  EXPECT_EQ(counts.shape(), Shape{B});
  const auto in = engine::to_vector<float>(x), out = engine::to_vector<float>(means);
  for (std::size_t c = 0; c < C; ++c) {
    EXPECT_NEAR(out[c], (in[c] + in[2 * C + c] + in[3 * C + c]) / 3, 1e-6);
    EXPECT_EQ(out[C + c], in[(T + 1) * C + c]);
  }
  expect_gradients(means);
}

TEST_F(OpsPage, PatchesOfImages) {
  constexpr std::int64_t h = 2, w = 3, p = 2;
  const Tensor image = random({B, C, h * p, w * p});
  Parameter &class_token = parameter({C * p * p}), &positions = parameter({h * w + 1, C * p * p});
  Tensor x = ops::permute(tape, image.reshape({B * C, h, p, w, p}), {0, 1, 3, 2, 4});
  EXPECT_EQ(x.shape(), (Shape{B * C, h, w, p, p}));
  x = ops::permute(tape, x.reshape({B, C, h * w, p * p}), {0, 2, 1, 3});
  EXPECT_EQ(x.shape(), (Shape{B, h * w, C, p * p}));
  x = x.reshape({B, h * w, C * p * p});
  {
    constexpr std::int64_t C = tessera::C * p * p;  // as many as a linear() could give
    const Tensor tokens = ops::broadcast(tape, ops::parameter(tape, class_token), {B, 1, C});
    x = ops::concat(tape, {tokens, x}, 1);
    EXPECT_EQ(x.shape(), (Shape{B, h * w + 1, C}));
    x = ops::add(tape, x, ops::broadcast(tape, ops::parameter(tape, positions), x.shape()));
  }
  expect_gradients(x);
}

TEST_F(OpsPage, Losses) {
  const Tensor x = random({B, T, C}), targets = integers({B, T}, V);
  Parameter& table = parameter({V, C});
  const Tensor class_weights = Tensor::from<float>(memory, {V}, std::vector<float>{1, 2, 3, 4, 5}, "weights");
  const Tensor logits = ops::linear(tape, x, table, nullptr, ops::WeightLayout::kOutIn);
  const Tensor loss = ops::linear_cross_entropy(tape, x, table, targets);
  const Tensor losses = ops::cross_entropy_rows(tape, logits, targets);
  const Tensor weights = ops::target_weights(tape, class_weights, targets);
  const Tensor weighted = ops::sum(tape, ops::mul(tape, losses, weights));
  EXPECT_NEAR(loss.item(), ops::cross_entropy(tape, logits, targets).item(), 1e-5);
  EXPECT_EQ(losses.shape(), targets.shape());
  EXPECT_EQ(weights.shape(), targets.shape());
  const float mean = ops::weighted_cross_entropy(tape, logits, targets, class_weights).item();
  EXPECT_NEAR(weighted.item(), mean * ops::sum(tape, weights).item(), 1e-4);
  expect_gradients(ops::add(tape, loss, weighted));
}

TEST_F(OpsPage, Experts) {
  constexpr std::int64_t N = 6, num_experts = 3, rows = 2 * N;
  const Tensor x = random({N, C});
  Parameter& w_router = parameter({C, num_experts});
  const ops::Routing r = ops::route(tape, ops::linear(tape, x, w_router, nullptr), {.k = 2, .capacity = rows});
  std::vector<Tensor> buffers = ops::dispatch(tape, x, r.slots, num_experts, rows);
  EXPECT_EQ(buffers[0].shape(), (Shape{rows, C}));
  for (Tensor& buffer : buffers) buffer = ops::gelu(tape, buffer);
  const Tensor y = ops::combine(tape, buffers, r.gates, r.slots);
  EXPECT_EQ(y.shape(), x.shape());
  // Each expert is GELU, so a token gets that of itself, as often as its gates add up to.
  const auto gates = engine::to_vector<float>(r.gates), out = engine::to_vector<float>(y);
  const auto whole = engine::to_vector<float>(ops::gelu(tape, x));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t n = i / C;
    EXPECT_NEAR(out[i], (gates[2 * n] + gates[2 * n + 1]) * whole[i], 1e-5);
  }
  expect_gradients(y);
}

// clang-format on

TEST(OpsPageLines, AreHere) { testing::expect_shown("docs/ops.md", "tests/docs/ops_test.cc", 35); }

}  // namespace
}  // namespace tessera

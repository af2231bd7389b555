// Attention of separate queries, keys and values: against its formula in double, against
// attention(), masks, gradients.
#include "ops/dot_product_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "ops/attention.h"
#include "ops/dims/slice.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;

struct Sizes {
  std::int64_t B, T, S, H, KV, D, E;
};
const Sizes kSizes[] = {
    {1, 1, 1, 1, 1, 1, 1}, {2, 3, 5, 4, 2, 6, 7}, {2, 5, 3, 3, 3, 4, 4}, {1, 4, 4, 6, 1, 8, 2}};

using Mask = std::function<Tensor(Tape&, engine::DType)>;

OpCase case_of(const Sizes& z, float scale = 0, const Mask& mask = {}) {
  return {.inputs = {{z.B, z.T, z.H, z.D}, {z.B, z.S, z.KV, z.D}, {z.B, z.S, z.KV, z.E}},
          .build = [=](Tape& tape, const auto& x, auto&) {
            return dot_product_attention(
                tape, x[0], x[1], x[2],
                {.scale = scale, .mask = mask ? mask(tape, x[0].dtype()) : Tensor()});
          }};
}

// `sees(b, t, s)`: whether a query sees a key.
Values naive(const Sizes& z, const std::vector<Values>& x, double scale, const auto& sees) {
  Values y;
  const auto at = [](const Values& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; };
  for (std::int64_t b = 0; b < z.B; ++b)
    for (std::int64_t t = 0; t < z.T; ++t)
      for (std::int64_t h = 0; h < z.H; ++h) {
        const std::int64_t g = h / (z.H / z.KV);
        Values p;
        double total = 0;
        for (std::int64_t s = 0; s < z.S; ++s) {
          double score = 0;
          for (std::int64_t d = 0; d < z.D; ++d)
            score += at(x[0], ((b * z.T + t) * z.H + h) * z.D + d) *
                     at(x[1], ((b * z.S + s) * z.KV + g) * z.D + d);
          p.push_back(sees(b, t, s) ? std::exp(scale * score) : 0);
          total += p.back();
        }
        for (std::int64_t e = 0; e < z.E; ++e) {
          double sum = 0;
          for (std::int64_t s = 0; s < z.S; ++s)
            sum += at(p, s) / total * at(x[2], ((b * z.S + s) * z.KV + g) * z.E + e);
          y.push_back(sum);
        }
      }
  return y;
}

TEST(DotProductAttention, EqualsItsFormulaInDouble) {
  const auto all = [](auto, auto, auto) { return true; };
  for (const Sizes& z : kSizes) {
    const OpRun run = run_op(case_of(z));
    expect_close(run.y, naive(z, run.leaves, 1 / std::sqrt(static_cast<double>(z.D)), all), 3e-6,
                 "y");
    const OpRun scaled = run_op(case_of(z, 0.3f));
    expect_close(scaled.y, naive(z, scaled.leaves, 0.3f, all), 3e-6, "y");
  }
}

TEST(DotProductAttention, SeesWhatTheMaskLeaves) {
  const Sizes z{2, 3, 5, 4, 2, 6, 7};
  const double scale = 1 / std::sqrt(6.0);
  for (const std::int64_t window : {0, 2}) {
    const OpRun run = run_op(case_of(
        z, 0, [&](Tape& t, DType dtype) { return causal_mask(t, z.T, z.S, dtype, window); }));
    expect_close(run.y,
                 naive(z, run.leaves, scale,
                       [&](auto, std::int64_t t, std::int64_t s) {
                         return s <= t + 2 && (window == 0 || s > t + 2 - window);
                       }),
                 3e-6, "y");
  }
  // Keys that are padding: of the second sequence the last two.
  const Mask padding = [&](Tape& t, DType dtype) {
    std::vector<float> values(10, 0);
    values[8] = values[9] = -std::numeric_limits<float>::infinity();
    return to_tensor(t.memory(), {2, 1, 1, 1, 5}, values, dtype);
  };
  const OpRun run = run_op(case_of(z, 0, padding));
  expect_close(run.y,
               naive(z, run.leaves, scale,
                     [](std::int64_t b, auto, std::int64_t s) { return b == 0 || s < 3; }),
               3e-6, "y");
  for (std::size_t leaf : {1u, 2u}) {  // what nobody sees has a gradient of 0
    const std::size_t row = run.grads[leaf].size() / 10;
    for (std::size_t i = 8 * row; i < 10 * row; ++i) EXPECT_EQ(run.grads[leaf][i], 0);
  }
  check_gradients(case_of(z, 0, padding));
}

TEST(DotProductAttention, GradientsWhenSharedOrOfData) {
  for (const Sizes& z : kSizes) check_gradients(case_of(z));
}

// It is made of several ops, each of which rounds.
TEST(DotProductAttention, Bf16IsF32RoundedAFewTimes) {
  for (const Sizes& z : kSizes) check_bf16(case_of(z), 0x1p-5);
}

// Of a packed q|k|v, causal.
TEST(DotProductAttention, IsAttention) {
  const std::int64_t B = 2, T = 7, H = 4, KV = 2, D = 8;
  const OpCase packed{.inputs = {{B, T, (H + 2 * KV) * D}},
                      .build = [=](Tape& t, const auto& x, auto&) {
                        return attention(t, x[0], {.num_heads = H, .num_kv_heads = KV});
                      }};
  const OpCase apart{.inputs = packed.inputs, .build = [=](Tape& t, const auto& x, auto&) {
                       const std::vector<Tensor> qkv = split(t, x[0], 2, {H * D, KV * D, KV * D});
                       const Tensor y = dot_product_attention(
                           t, qkv[0].reshape({B, T, H, D}), qkv[1].reshape({B, T, KV, D}),
                           qkv[2].reshape({B, T, KV, D}),
                           {.mask = causal_mask(t, T, T, x[0].dtype())});
                       return y.reshape({B, T, H * D});
                     }};
  const OpRun want = run_op(packed), got = run_op(apart);
  expect_close(got.y, want.y, 3e-6, "y");
  expect_close(got.grads[0], want.grads[0], 5e-6, "dqkv");
}

TEST(DotProductAttention, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const auto of = [&](const Shape& shape, DType dtype = DType::kF32) {
    return Tensor::zeros(memory, shape, dtype);
  };
  const Tensor q = of({2, 3, 4, 6}), k = of({2, 5, 2, 6}), v = of({2, 5, 2, 7});
  EXPECT_EQ(dot_product_attention(tape, q, k, v).shape(), (Shape{2, 3, 4, 7}));
  const auto refuses = [&](const Tensor& a, const Tensor& b, const Tensor& c,
                           const DotProductOptions& options = {}) {
    EXPECT_THROW(dot_product_attention(tape, a, b, c, options), InvalidArgument);
  };
  refuses(q.reshape({6, 4, 6}), k, v);
  refuses(q, of({1, 5, 2, 6}), v);
  refuses(q, of({2, 5, 3, 6}), of({2, 5, 3, 7}));
  refuses(q, of({2, 5, 2, 5}), v);
  refuses(q, k, of({2, 4, 2, 7}));
  refuses(q, k, of({2, 5, 1, 7}));
  refuses(q, k, of({2, 5, 2, 7}, DType::kBF16));
  refuses(q, k, v, {.scale = -1});
  refuses(q, k, v, {.mask = of({3, 4})});
  refuses(q, k, v, {.mask = of({2, 1, 1, 5})});  // as others have it, for each batch and head
  refuses(q, k, v, {.mask = of({2, 3, 5})});
  refuses(q, k, v, {.mask = of({3, 5}, DType::kBF16)});
  EXPECT_THROW(causal_mask(tape, 3, 2, DType::kF32), InvalidArgument);
  EXPECT_THROW(causal_mask(tape, 2, 3, DType::kF32, -1), InvalidArgument);
  EXPECT_THROW(causal_mask(tape, 2, 3, DType::kI32), InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops

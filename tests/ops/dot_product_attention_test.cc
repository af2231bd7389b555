// Attention of separate queries, keys and values: against its formula in double, against
// attention(), masks, gradients.
#include "ops/dot_product_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention.h"
#include "ops/dims/slice.h"
#include "tests/ops/dot_product_cases.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;

const AttentionSizes kSizes[] = {
    {1, 1, 1, 1, 1, 1, 1}, {2, 3, 5, 4, 2, 6, 7}, {2, 5, 3, 3, 3, 4, 4}, {1, 4, 4, 6, 1, 8, 2}};

// It is made of several ops, each of which rounds.
constexpr double kBf16Tolerance = 0x1p-5;

// Of the scores, as a case with `scale` has it.
double factor_of(const AttentionSizes& z, float scale) {
  return scale > 0 ? static_cast<double>(scale) : 1 / std::sqrt(static_cast<double>(z.D));
}

Values naive(const AttentionSizes& z, const std::vector<Values>& x, double scale,
             const Sees& sees) {
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
  for (const AttentionSizes& z : kSizes) {
    for (const float scale : {0.0f, 0.3f}) {
      const OpRun run = run_op(dot_product_case(z, scale));
      expect_close(run.y, naive(z, run.leaves, factor_of(z, scale), all), 3e-6, "y");
    }
  }
}

TEST(DotProductAttention, SeesWhatTheMaskLeaves) {
  for (const MaskedCase& m : masked_cases()) {
    SCOPED_TRACE(m.name);
    for (const float scale : {0.0f, 0.3f}) {
      const OpCase op = dot_product_case(m.sizes, scale, m.mask);
      const OpRun run = run_op(op);
      expect_close(run.y, naive(m.sizes, run.leaves, factor_of(m.sizes, scale), m.sees), 3e-6, "y");
      check_gradients(op);
      check_bf16(op, kBf16Tolerance);
    }
    // What nobody sees has a gradient of 0.
    const OpRun run = run_op(dot_product_case(m.sizes, 0, m.mask));
    const std::int64_t num_keys = m.sizes.B * m.sizes.S;
    for (std::int64_t key = 0; key < num_keys; ++key) {
      bool is_seen = false;
      for (std::int64_t t = 0; t < m.sizes.T; ++t)
        is_seen = is_seen || m.sees(key / m.sizes.S, t, key % m.sizes.S);
      for (const std::size_t leaf : {1u, 2u}) {
        const auto width = static_cast<std::int64_t>(run.grads[leaf].size()) / num_keys;
        const auto begin = run.grads[leaf].begin() + key * width;
        if (!is_seen) {
          EXPECT_EQ(Values(begin, begin + width), Values(static_cast<std::size_t>(width), 0));
        }
      }
    }
  }
}

TEST(DotProductAttention, GradientsWhenSharedOrOfData) {
  for (const AttentionSizes& z : kSizes)
    for (const float scale : {0.0f, 0.3f}) check_gradients(dot_product_case(z, scale));
}

TEST(DotProductAttention, Bf16IsF32RoundedAFewTimes) {
  for (const AttentionSizes& z : kSizes)
    for (const float scale : {0.0f, 0.3f}) check_bf16(dot_product_case(z, scale), kBf16Tolerance);
}

// Of a packed q|k|v, causal, with and without documents that share a row.
TEST(DotProductAttention, IsAttention) {
  const std::int64_t B = 2, T = 7, H = 4, KV = 2, D = 8;
  std::vector<std::int32_t> places;
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t t = 0; t < T; ++t)
      places.push_back(static_cast<std::int32_t>(t - document_begin(b, t)));
  for (const bool has_documents : {false, true}) {
    const OpCase packed{
        .inputs = {{B, T, (H + 2 * KV) * D}}, .build = [=](Tape& t, const auto& x, auto&) {
          const Tensor positions =
              has_documents ? Tensor::from<std::int32_t>(t.memory(), {B, T}, places) : Tensor();
          return attention(t, x[0], {.num_heads = H, .num_kv_heads = KV, .positions = positions});
        }};
    const OpCase apart{.inputs = packed.inputs, .build = [=](Tape& t, const auto& x, auto&) {
                         const std::vector<Tensor> qkv = split(t, x[0], 2, {H * D, KV * D, KV * D});
                         const DType dtype = x[0].dtype();
                         const Tensor mask = has_documents
                                                 ? mask_of(B, T, T, sees_its_document)(t, dtype)
                                                 : causal_mask(t, T, T, dtype);
                         const Tensor y = dot_product_attention(
                             t, qkv[0].reshape({B, T, H, D}), qkv[1].reshape({B, T, KV, D}),
                             qkv[2].reshape({B, T, KV, D}), {.mask = mask});
                         return y.reshape({B, T, H * D});
                       }};
    const OpRun want = run_op(packed), got = run_op(apart);
    expect_close(got.y, want.y, 3e-6, "y");
    expect_close(got.grads[0], want.grads[0], 5e-6, "dqkv");
  }
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

// Attention against a naive reference in double precision, and what tiles must not change:
// causality, bits, memory.
#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/gemm/gemm.h"
#include "engine/gemm/pairs.h"
#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::Stream;

struct Case {
  std::int64_t batch, tokens, heads, kv_heads, head_size;
  bool causal = true;
  float scale = 0;
  // Lengths in the first sample, which every other sample has the other way round; none: a row is
  // one document.
  std::vector<std::int64_t> documents = {};

  std::int64_t width() const { return (heads + 2 * kv_heads) * head_size; }
  Shape qkv_shape() const { return {batch, tokens, width()}; }
  AttentionShape shape() const {
    return {.num_heads = heads,
            .num_kv_heads = kv_heads,
            .scale = scale,
            .causal = causal,
            .positions = documents.empty() ? Tensor() : positions()};
  }
  std::vector<std::int64_t> documents_of(std::int64_t b) const {
    std::vector<std::int64_t> of_sample = documents;
    if (b % 2 == 1) std::ranges::reverse(of_sample);
    return of_sample;
  }
  Tensor positions() const {
    std::vector<std::int32_t> at;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (const std::int64_t length : documents_of(b))
        for (std::int64_t t = 0; t < length; ++t) at.push_back(static_cast<std::int32_t>(t));
    }
    return Tensor::from<std::int32_t>(Memory(), {batch, tokens}, at);
  }
  // The first key that token t of a sample sees.
  std::int64_t first_key(std::int64_t b, std::int64_t t) const {
    std::int64_t begin = 0;
    for (const std::int64_t length : documents_of(b)) {
      if (begin + length > t) break;
      begin += length;
    }
    return begin;
  }
  std::string str() const {
    return fmt::format("B{} T{} H{} KV{} D{} {}", batch, tokens, heads, kv_heads, head_size,
                       causal ? "causal" : "full");
  }
};

OpCase attention_case(const Case& c) {
  return {.inputs = {c.qkv_shape()}, .build = [c](Tape& tape, const auto& x, auto&) {
            return attention(tape, x[0], c.shape());
          }};
}

struct Naive {
  Values y, dqkv;
};

Naive naive_attention(const Case& c, const Values& qkv, const Values& dy) {
  const std::int64_t d = c.head_size, out_width = c.heads * d;
  const double scale = c.scale == 0 ? 1 / std::sqrt(static_cast<double>(d)) : c.scale;
  Naive result{Values(static_cast<std::size_t>(c.batch * c.tokens * out_width)),
               Values(qkv.size())};
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t g = h / (c.heads / c.kv_heads);
      const auto at = [&](std::int64_t t, std::int64_t head) {
        return static_cast<std::size_t>((b * c.tokens + t) * c.width() + head * d);
      };
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const std::int64_t begin = c.first_key(b, t), end = c.causal ? t + 1 : c.tokens;
        const std::size_t q = at(t, h);
        const auto y = static_cast<std::size_t>((b * c.tokens + t) * out_width + h * d);
        Values p(static_cast<std::size_t>(end)), dp(p.size());
        double largest = -1e300, sum = 0, delta = 0;
        for (std::int64_t s = begin; s < end; ++s) {
          const std::size_t k = at(s, c.heads + g), j = static_cast<std::size_t>(s);
          for (std::int64_t i = 0; i < d; ++i) p[j] += scale * qkv[q + i] * qkv[k + i];
          largest = std::max(largest, p[j]);
        }
        for (auto e = p.begin() + begin; e != p.end(); ++e) sum += * e = std::exp(*e - largest);
        for (std::int64_t s = begin; s < end; ++s) {
          const std::size_t v = at(s, c.heads + c.kv_heads + g), j = static_cast<std::size_t>(s);
          p[j] /= sum;
          for (std::int64_t i = 0; i < d; ++i) {
            result.y[y + i] += p[j] * qkv[v + i];
            result.dqkv[v + i] += p[j] * dy[y + i];
            dp[j] += dy[y + i] * qkv[v + i];
          }
          delta += p[j] * dp[j];
        }
        for (std::int64_t s = begin; s < end; ++s) {
          const std::size_t k = at(s, c.heads + g), j = static_cast<std::size_t>(s);
          const double ds = scale * p[j] * (dp[j] - delta);
          for (std::int64_t i = 0; i < d; ++i) {
            result.dqkv[q + i] += ds * qkv[k + i];
            result.dqkv[k + i] += ds * qkv[q + i];
          }
        }
      }
    }
  }
  return result;
}

// `ulps`: how much larger than 1 a rounding of the scores is; it shows in exp(score).
void expect_naive(const Case& c, float input_scale = 1, double ulps = 1) {
  SCOPED_TRACE(c.str());
  OpCase op = attention_case(c);
  op.scale = input_scale;
  const OpRun run = run_op(op);
  const Naive want = naive_attention(c, run.leaves[0], run.dy);
  expect_close(run.y, want.y, ulps * 5e-6, "y");
  expect_close(run.grads[0], want.dqkv, ulps * 1e-5, "dqkv");
}

TEST(AttentionTest, EqualsTheReferenceForAllLengthsAndHeadSizes) {
  for (const std::int64_t tokens : {1, 2, 31, 33, 34, 48, 49, 66, 100, 257, 258, 289, 337}) {
    for (const std::int64_t head_size : {1, 13, 64, 128})
      expect_naive({1, tokens, 2, 2, head_size});
  }
  expect_naive({1, 600, 1, 1, 16});  // more than two tiles of keys
}

TEST(AttentionTest, EqualsTheReferenceForAllGroups) {
  for (const auto& [heads, kv_heads] : {std::tuple{4, 2}, {6, 2}, {3, 1}, {2, 2}})
    expect_naive({2, 70, heads, kv_heads, 8});
}

TEST(AttentionTest, EqualsTheReferenceWithoutTheCausalMask) {
  expect_naive({2, 1, 2, 1, 8, false});
  expect_naive({1, 300, 2, 1, 8, false});
}

TEST(AttentionTest, EqualsTheReferenceForLargeScores) {
  // Scores beyond +-100: maxima change by tile. An f32 of that size is known to 1e-5 only.
  expect_naive({1, 600, 1, 1, 16, true, 1.5f}, 3, 10);
}

TEST(AttentionTest, GradientsMatchDifferences) {
  check_gradients(attention_case({2, 5, 2, 1, 3}));
  check_gradients(attention_case({1, 35, 1, 1, 4, false}));
}

TEST(AttentionTest, BFloat16MatchesF32) {
  check_bf16(attention_case({2, 37, 4, 2, 16}));
  check_bf16(attention_case({1, 260, 1, 1, 8, false}));
  check_bf16(attention_case({1, 300, 2, 1, 8}));
}

// y and its gradient are rounded to bf16, and so are probabilities and the gradients of scores,
// where products read bf16.
void expect_naive_bf16(const Case& c, float input_scale = 1) {
  SCOPED_TRACE(c.str());
  OpCase op = attention_case(c);
  op.scale = input_scale;
  const OpRun run = run_op(op, {.dtype = DType::kBF16});
  const Naive want = naive_attention(c, run.leaves[0], run.dy);
  expect_close(run.y, want.y, 0x1p-8, "y");
  expect_close(run.grads[0], want.dqkv, 0x1p-7, "dqkv");
}

TEST(AttentionTest, BFloat16EqualsTheReferenceForAllLengthsAndHeadSizes) {
  // Around tiles of 24 queries and of 256 keys, pairs and vectors.
  for (const std::int64_t tokens : {1, 2, 15, 23, 24, 25, 49, 100, 255, 256, 257, 290}) {
    for (const std::int64_t head_size : {1, 13, 16, 33, 64}) {
      expect_naive_bf16({1, tokens, 2, 2, head_size});
    }
  }
  expect_naive_bf16({1, 530, 1, 1, 96});
  expect_naive_bf16({1, 49, 1, 1, 128});
}

TEST(AttentionTest, BFloat16EqualsTheReferenceForGroupsAndWithoutTheMask) {
  for (const auto& [heads, kv_heads] : {std::tuple{4, 2}, {3, 1}})
    expect_naive_bf16({2, 70, heads, kv_heads, 8});
  for (const std::int64_t tokens : {1, 31, 70, 257}) expect_naive_bf16({2, tokens, 2, 1, 8, false});
}

TEST(AttentionTest, BFloat16EqualsTheReferenceForLargeScores) {
  expect_naive_bf16({1, 600, 1, 1, 13, true, 1.5f}, 3);
}

// A probability that is 1 leaves queries and keys no gradient, however large its score: y is then
// that value, to the bit, so dy v and dy y differ by what their sums round.
TEST(AttentionTest, SaturatedRowsGiveQueriesAndKeysNoGradient) {
  const Case c{1, 40, 2, 2, 16};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const float magnitude : {300.0f, 1000.0f}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(dtype), magnitude));
      OpCase op = attention_case(c);
      op.scale = magnitude;
      const OpRun run = run_op(op, {.dtype = dtype});
      const Naive want = naive_attention(c, run.leaves[0], run.dy);
      expect_close(run.y, want.y, 0x1p-8, "y");
      const auto largest = [](const Values& x) {
        return std::abs(*std::ranges::max_element(x, {}, [](double v) { return std::abs(v); }));
      };
      const double bound =
          4e-6 * 16 * largest(run.dy) * std::pow(largest(run.leaves[0]), 2) / std::sqrt(16.0);
      for (std::size_t i = 0; i < run.grads[0].size(); ++i) {
        if (i % static_cast<std::size_t>(c.width()) >= 4 * 16) continue;  // of a value
        ASSERT_NEAR(run.grads[0][i], want.dqkv[i], bound) << i;
      }
    }
  }
}

TEST(AttentionTest, GradientIsAddedToWhatIsThere) {
  const Memory memory;
  const Shape shape = {1, 40, 32};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor x = to_tensor(memory, shape, random_values(shape.numel(), 1), dtype);
    const Tensor ones = to_tensor(memory, shape, std::vector<float>(40 * 32, 1), dtype);
    const auto grad = [&](bool with_ones) {
      Tape tape(memory, Stream::inline_cpu("compute"));
      tape.watch(x);
      const Tensor y = attention(tape, x, {.num_heads = 2, .num_kv_heads = 1});
      const Tensor dy = to_tensor(memory, y.shape(), random_values(y.numel(), 2), dtype);
      const Tensor loss = tape.empty({}, DType::kF32, "loss");
      tape.record("loss", loss, [&, y, dy](const Tensor&) {
        if (with_ones) tape.pass_grad(x, ones);
        tape.pass_grad(y, dy);
      });
      tape.backward(loss);
      return to_values(tape.grad(x));
    };
    const Values alone = grad(false), added = grad(true);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      const double want = 1 + alone[i];
      if (dtype == DType::kF32) {
        ASSERT_EQ(added[i], static_cast<float>(want)) << i;
      } else {
        // Both are rounded, each once.
        ASSERT_NEAR(added[i], want, (std::abs(want) + std::abs(alone[i])) * 0x1.01p-8) << i;
      }
    }
    EXPECT_EQ(to_values(ones), Values(40 * 32, 1)) << "a gradient that was handed over is not ours";
  }
}

TEST(AttentionTest, LaterTokensDoNotChangeEarlierOnes) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  constexpr std::int64_t kTokens = 300, kWidth = 4 * 8;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<float> values = random_values(kTokens * kWidth, 1);
    const auto run = [&] {
      return to_values(attention(tape, to_tensor(memory, {1, kTokens, kWidth}, values, dtype),
                                 {.num_heads = 2, .num_kv_heads = 1}));
    };
    const Values before = run();
    for (const std::int64_t changed : {299, 288, 287, 256, 255, 40, 31, 1}) {
      const std::vector<float> others = random_values(kTokens * kWidth, 2, 30);
      std::copy(others.begin() + changed * kWidth, others.end(), values.begin() + changed * kWidth);
      const Values after = run();
      const auto end = static_cast<std::ptrdiff_t>(changed * 2 * 8);
      EXPECT_TRUE(std::equal(before.begin(), before.begin() + end, after.begin())) << changed;
      EXPECT_NE(before[static_cast<std::size_t>(end)], after[static_cast<std::size_t>(end)]);
    }
  }
}

TEST(AttentionTest, TheLastTokenChangesNoOtherOneForAnyLength) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  constexpr std::int64_t kWidth = 3 * 2;
  // Around a tile of keys.
  std::vector<std::int64_t> lengths = {256, 257, 258, 287, 288, 289, 290, 337};
  for (std::int64_t tokens = 2; tokens <= 67; ++tokens) lengths.push_back(tokens);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t tokens : lengths) {
      std::vector<float> values = random_values(tokens * kWidth, 1);
      const auto run = [&] {
        const Tensor qkv = to_tensor(memory, {1, tokens, kWidth}, values, dtype);
        return to_values(attention(tape, qkv, {.num_heads = 1}));
      };
      const Values before = run();
      for (auto v = values.end() - kWidth; v != values.end(); ++v) *v += 30;
      const Values after = run();
      EXPECT_TRUE(std::equal(before.begin(), before.end() - 2, after.begin())) << tokens;
      EXPECT_NE(before.back(), after.back()) << tokens;
    }
  }
}

// Lengths around tiles of queries, of keys and of both, and documents of a token.
const std::vector<std::vector<std::int64_t>>& packed_rows() {
  static const std::vector<std::vector<std::int64_t>> kRows = {
      {1, 1, 1}, {5, 30}, {40, 1, 2, 31}, {24, 48, 49}, {290, 7}, {3, 260, 25, 1}, {330}};
  return kRows;
}

Case packed_case(const std::vector<std::int64_t>& documents, std::int64_t head_size) {
  const std::int64_t tokens = std::accumulate(documents.begin(), documents.end(), std::int64_t{0});
  return {2, tokens, 4, 2, head_size, true, 0, documents};
}

TEST(AttentionTest, DocumentsOfARowSeeNothingOfEachOther) {
  for (const auto& documents : packed_rows()) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(documents, " ")));
    for (const std::int64_t head_size : {5, 32}) {
      expect_naive(packed_case(documents, head_size));
      expect_naive_bf16(packed_case(documents, head_size));
    }
  }
  check_gradients(attention_case({2, 7, 2, 1, 3, true, 0, {2, 1, 4}}));
}

// y and dqkv of documents in a row, and of each of them in a row of its own.
TEST(AttentionTest, ADocumentHasTheBitsThatItHasAlone) {
  const Memory memory;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (dtype == DType::kBF16 && engine::multiplies_bf16() && !engine::multiplies_pairs()) continue;
    for (const auto& documents : packed_rows()) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(dtype), fmt::join(documents, " ")));
      const Case c = packed_case(documents, 20);
      const std::vector<float> values = random_values(c.qkv_shape().numel(), 1);
      const std::int64_t y_width = c.heads * c.head_size;
      const std::vector<float> dvalues = random_values(c.batch * c.tokens * y_width, 2);
      // Rows [begin, begin + tokens) of all samples.
      const auto run = [&](std::int64_t begin, std::int64_t tokens, const AttentionShape& shape) {
        Tape tape(memory, Stream::inline_cpu("compute"));
        const auto rows_of = [&](const std::vector<float>& from, std::int64_t width) {
          const auto at = from.begin() + begin * width;
          return to_tensor(
              memory, {tokens == c.tokens ? c.batch : 1, tokens, width},
              std::vector<float>(at, tokens == c.tokens ? from.end() : at + tokens * width), dtype);
        };
        const Tensor qkv = rows_of(values, c.width()), dy = rows_of(dvalues, y_width);
        tape.watch(qkv);
        const Tensor y = attention(tape, qkv, shape);
        const Tensor loss = tape.empty({}, DType::kF32, "loss");
        tape.record("loss", loss, [&tape, y, dy](const Tensor&) { tape.pass_grad(y, dy); });
        tape.backward(loss);
        return std::pair(to_values(y), to_values(tape.grad(qkv)));
      };
      const auto [y, dqkv] = run(0, c.tokens, c.shape());
      AttentionShape alone = c.shape();
      alone.positions = {};
      const auto part = [&](const Values& of, std::int64_t begin, std::int64_t tokens,
                            std::int64_t width) {
        return Values(of.begin() + begin * width, of.begin() + (begin + tokens) * width);
      };
      for (std::int64_t b = 0, begin = 0; b < c.batch; ++b) {
        for (const std::int64_t tokens : c.documents_of(b)) {
          if (tokens == c.tokens) continue;
          const auto [own_y, own_dqkv] = run(begin, tokens, alone);
          EXPECT_EQ(part(y, begin, tokens, y_width), own_y) << begin;
          EXPECT_EQ(part(dqkv, begin, tokens, c.width()), own_dqkv) << begin;
          begin += tokens;
        }
      }
    }
  }
}

// What one document leaves in scratch is not read for the next.
TEST(AttentionTest, NumbersThatAreNotFiniteStayInTheirDocument) {
  const Memory memory;
  const Case c{1, 75, 2, 1, 6, true, 0, {33, 7, 35}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Tape tape(memory, Stream::inline_cpu("compute"));
    std::vector<float> values = random_values(c.qkv_shape().numel(), 1);
    std::fill_n(values.begin(), 33 * c.width(), std::numeric_limits<float>::infinity());
    const Tensor qkv = to_tensor(memory, c.qkv_shape(), values, dtype);
    tape.watch(qkv);
    const Tensor y = attention(tape, qkv, c.shape());
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    tape.record("loss", loss, [&tape, y](const Tensor&) { tape.pass_grad(y, y); });
    tape.backward(loss);
    const auto num_finite = [](const Values& of) {
      return std::ranges::count_if(of, [](double x) { return std::isfinite(x); });
    };
    EXPECT_EQ(num_finite(to_values(y)), 42 * 2 * 6) << name_of(dtype);
    EXPECT_EQ(num_finite(to_values(tape.grad(qkv))), 42 * c.width()) << name_of(dtype);
  }
}

// A row begins a document whatever its first position, and only a 0 begins another.
TEST(AttentionTest, OnlyPositionZeroBeginsADocument) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor qkv = to_tensor(memory, {1, 6, 12}, random_values(72, 1), DType::kF32);
  const auto y_of = [&](const std::vector<std::int32_t>& positions) {
    return to_values(attention(
        tape, qkv,
        {.num_heads = 2, .positions = Tensor::from<std::int32_t>(memory, {1, 6}, positions)}));
  };
  EXPECT_EQ(y_of({7, 8, 3, 0, 1, -5}), y_of({0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(y_of({9, 1, 1, 1, 1, 1}), to_values(attention(tape, qkv, {.num_heads = 2})));
}

TEST(AttentionTest, SameBitsTwice) {
  const OpCase op = attention_case({2, 130, 4, 2, 24});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const OpRun one = run_op(op, {.dtype = dtype}), other = run_op(op, {.dtype = dtype});
    EXPECT_EQ(one.y, other.y);
    EXPECT_EQ(one.grads, other.grads);
  }
}

TEST(AttentionTest, MemoryGrowsWithTokensNotTheirSquare) {
  constexpr std::int64_t kSize = 16, kHeads = 2;
  const auto workspace_nbytes = [&](std::int64_t tokens, DType dtype) {
    const Memory memory;
    Tape tape(memory, Stream::inline_cpu("compute"));
    const Tensor x = Tensor::zeros(memory, {1, tokens, 3 * kHeads * kSize}, dtype);
    tape.watch(x);
    const Tensor y = attention(tape, x, {.num_heads = kHeads});
    // Saved: qkv, y and one number a query.
    const auto activation = static_cast<std::size_t>(engine::Category::kActivation);
    EXPECT_EQ(memory.stats().peak_nbytes[activation],
              x.nbytes() + y.nbytes() + kHeads * tokens * 4);
    const Tensor loss = tape.empty({}, DType::kF32, "loss");
    tape.record("loss", loss, [&tape, y](const Tensor&) { tape.pass_grad(y, y); });
    tape.backward(loss);
    return memory.stats().peak_nbytes[static_cast<std::size_t>(engine::Category::kWorkspace)];
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t half = workspace_nbytes(1024, dtype), whole = workspace_nbytes(2048, dtype);
    EXPECT_GT(whole, half);
    EXPECT_LE(whole, 2 * half);
    EXPECT_LT(whole, 2048 * 2048 * 4 / 8);
  }
}

// What is not finite must not end as a number: training looks at the norm of gradients.
TEST(AttentionTest, WhatIsNotFiniteStaysSo) {
  const Memory memory;
  constexpr std::int64_t kTokens = 60, kSize = 3, kChanged = 40;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const std::int64_t part : {0, 1, 2}) {  // q, k, v
        std::vector<float> values = random_values(kTokens * 3 * kSize, 1);
        values[static_cast<std::size_t>((kChanged * 3 + part) * kSize + 1)] = bad;
        Tape tape(memory, Stream::inline_cpu("compute"));
        const Tensor qkv = to_tensor(memory, {1, kTokens, 3 * kSize}, values, dtype);
        tape.watch(qkv);
        const Tensor y = attention(tape, qkv, {.num_heads = 1});
        const Tensor loss = tape.empty({}, DType::kF32, "loss");
        const Tensor dy = to_tensor(memory, y.shape(), random_values(y.numel(), 2), dtype);
        tape.record("loss", loss, [&tape, y, dy](const Tensor&) { tape.pass_grad(y, dy); });
        tape.backward(loss);
        const auto count_bad = [](const Values& v, std::int64_t begin) {
          return std::count_if(v.begin() + begin, v.end(),
                               [](double x) { return !std::isfinite(x); });
        };
        EXPECT_GT(count_bad(to_values(y), kChanged * kSize), 0) << name_of(dtype) << part << bad;
        EXPECT_GT(count_bad(to_values(tape.grad(qkv)), 0), 0) << name_of(dtype) << part << bad;
      }
    }
  }
}

TEST(AttentionTest, NothingOfNothingIsNothing) {
  const Memory memory;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 5, 12}, Shape{2, 0, 12}}) {
      Tape tape(memory, Stream::inline_cpu("compute"));
      const Tensor qkv = Tensor::zeros(memory, shape, dtype);
      tape.watch(qkv);
      const Tensor y = attention(tape, qkv, {.num_heads = 2});
      EXPECT_EQ(y.numel(), 0);
      const Tensor loss = tape.empty({}, DType::kF32, "loss");
      tape.record("loss", loss, [&tape, y](const Tensor&) { tape.pass_grad(y, y); });
      tape.backward(loss);
    }
  }
}

struct Recorder : engine::LaunchListener {
  std::vector<engine::Work> works;
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    if (record.work.name.starts_with("attention")) works.push_back(record.work);
  }
};

TEST(AttentionTest, StatesItsWork) {
  const Memory memory;
  Recorder recorder;
  Tape tape(memory, Stream::inline_cpu("compute", {.listener = &recorder}));
  constexpr std::int64_t kTokens = 100, kSize = 16, kHeads = 4, kKvHeads = 2;
  const Tensor x =
      Tensor::zeros(memory, {2, kTokens, (kHeads + 2 * kKvHeads) * kSize}, DType::kBF16);
  tape.watch(x);
  const Tensor y = attention(tape, x, {.num_heads = kHeads, .num_kv_heads = kKvHeads});
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("loss", loss, [&tape, y](const Tensor&) { tape.pass_grad(y, y); });
  tape.backward(loss);
  ASSERT_EQ(recorder.works.size(), 2u);
  const engine::Work &forward = recorder.works[0], &backward = recorder.works[1];
  const double pairs = 2 * kHeads * kTokens * (kTokens + 1) / 2.0;
  EXPECT_EQ(forward.name, "attention.forward");
  EXPECT_EQ(backward.name, "attention.backward");
  EXPECT_EQ(backward.flops - forward.flops, pairs * 3 * 2 * kSize);  // five products, not two
  EXPECT_NEAR(forward.flops, pairs * (2 * 2 * kSize + 20), pairs * 10);
  const std::int64_t lse_nbytes = 2 * kHeads * kTokens * 4;
  EXPECT_EQ(forward.bytes_read, x.nbytes());
  EXPECT_EQ(forward.bytes_written, y.nbytes() + lse_nbytes);
  EXPECT_EQ(backward.bytes_read, x.nbytes() + 2 * y.nbytes() + lse_nbytes);
  EXPECT_EQ(backward.bytes_written, x.nbytes());
}

TEST(AttentionTest, RefusesShapesThatDoNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = Tensor::zeros(memory, {1, 3, 24}, DType::kF32);
  EXPECT_THROW(attention(tape, x, {.num_heads = 5}), engine::InvalidArgument);
  EXPECT_THROW(attention(tape, x, {.num_heads = 0}), engine::InvalidArgument);
  EXPECT_THROW(attention(tape, x, {.num_heads = 4, .num_kv_heads = 3}), engine::InvalidArgument);
  EXPECT_THROW(attention(tape, x, {.num_heads = 2, .num_kv_heads = -2}), engine::InvalidArgument);
  EXPECT_THROW(attention(tape, x, {.num_heads = 2, .scale = -1}), engine::InvalidArgument);
  EXPECT_THROW(attention(tape, x.reshape({3, 24}), {.num_heads = 2}), engine::InvalidArgument);
  EXPECT_THROW(attention(tape, Tensor::zeros(memory, {1, 3, 24}, DType::kI32), {.num_heads = 2}),
               engine::InvalidArgument);
  const auto refusal = [&](const Shape& shape, DType dtype, bool causal) {
    return error_of<engine::InvalidArgument>([&] {
      attention(tape, x,
                {.num_heads = 2,
                 .causal = causal,
                 .positions = Tensor::zeros(memory, shape, dtype, "places")});
    });
  };
  EXPECT_TRUE(
      has(refusal({3}, DType::kI32, true), {"positions i32 (1, 3)", "got i32 (3)", "places"}));
  EXPECT_TRUE(has(refusal({1, 3}, DType::kF32, true), {"positions i32 (1, 3)", "got f32 (1, 3)"}));
  EXPECT_TRUE(has(refusal({1, 3}, DType::kI32, false), {"expected causal with positions"}));
}

}  // namespace
}  // namespace tessera::ops

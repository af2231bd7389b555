// Attention on a GPU against the CPU op, over the sizes at which tiles, warps and loads differ.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/tape.h"
#include "ops/attention.h"
#include "tests/testing/cuda_op.h"
#include "tests/testing/errors.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

// Bounds as parts of the largest element. bf16 is compared with the CPU op in f32 on the same bf16
// values: the probabilities and their gradients are rounded to bf16 before they enter a product,
// 2^-8 of each, and so is the result.
constexpr double kF32Bound = 1e-5, kBF16Bound = 0x1p-7;

struct Case {
  std::int64_t batch, tokens, heads, kv_heads, head_size;
  bool causal = true;
  float scale = 0;                           ///< of the inputs; 0: 1
  std::vector<std::int64_t> documents = {};  ///< lengths, in turn to the end of all samples' tokens
};

// Of all samples, which begin documents of their own.
Tensor positions_of(const Case& c, const Memory& memory) {
  std::vector<std::int32_t> at;
  for (std::size_t i = 0; std::ssize(at) < c.batch * c.tokens; ++i) {
    const std::int64_t length = c.documents[i % c.documents.size()];
    for (std::int64_t t = 0; t < length; ++t) at.push_back(static_cast<std::int32_t>(t));
  }
  at.resize(static_cast<std::size_t>(c.batch * c.tokens));
  return Tensor::from<std::int32_t>(memory, {c.batch, c.tokens}, at);
}

OpCase attention_case(const Case& c, CudaAttention cuda) {
  return {.inputs = {{c.batch, c.tokens, (c.heads + 2 * c.kv_heads) * c.head_size}},
          .build =
              [c, cuda](Tape& tape, const auto& x, auto&) {
                return attention(
                    tape, x[0],
                    {.num_heads = c.heads,
                     .num_kv_heads = c.kv_heads,
                     .causal = c.causal,
                     .positions = c.documents.empty() ? Tensor() : positions_of(c, tape.memory()),
                     .cuda = cuda});
              },
          .scale = c.scale == 0 ? 1 : c.scale};
}

void expect_bf16(const OpCase& op, int num_uses = 1) {
  const OpRun want = run_op(op, {.round_to_bf16 = true, .num_uses = num_uses});
  const RunOptions options{
      .dtype = DType::kBF16, .round_to_bf16 = true, .num_uses = num_uses, .on_cuda = true};
  const OpRun got = run_op(op, options), again = run_op(op, options);
  EXPECT_EQ(got.y, again.y) << "y, run twice";
  EXPECT_EQ(got.grads, again.grads) << "gradient, run twice";
  expect_close(got.y, want.y, kBF16Bound, "y");
  expect_close(got.grads[0], want.grads[0], num_uses * kBF16Bound, "dqkv");
}

// With each of the kernels that a GPU may choose for bf16.
class CudaAttentionTest : public ::testing::TestWithParam<CudaAttention> {
 protected:
  static bool is_default() { return GetParam() == CudaAttention::kMma; }
  static OpCase attention_case(const Case& c) { return ops::attention_case(c, GetParam()); }

  // f32 knows no choice.
  static void expect_f32(const OpCase& op, int num_uses = 1, double bound = kF32Bound) {
    if (is_default()) check_cuda_run(op, {.num_uses = num_uses}, {.f32 = bound});
  }

  static void expect_as_cpu(const Case& c) {
    SCOPED_TRACE(fmt::format("B{} T{} H{} KV{} D{} {}", c.batch, c.tokens, c.heads, c.kv_heads,
                             c.head_size, c.causal ? "causal" : "full"));
    const OpCase op = attention_case(c);
    expect_f32(op);
    expect_bf16(op);
  }
};

TEST_P(CudaAttentionTest, EqualsTheCpuForAllLengthsAndHeadSizes) {
  for (const std::int64_t tokens : {1, 31, 33, 64, 130}) {
    for (const std::int64_t head_size : {13, 64, 128}) expect_as_cpu({1, tokens, 1, 1, head_size});
  }
  for (const std::int64_t head_size : {1, 32, 40, 80}) expect_as_cpu({1, 35, 1, 1, head_size});
}

TEST_P(CudaAttentionTest, EqualsTheCpuForManyTiles) {
  expect_as_cpu({1, 1025, 1, 1, 8});
  expect_as_cpu({1, 200, 1, 1, 128});
  expect_as_cpu({2, 300, 4, 2, 16});
  expect_as_cpu({1, 600, 1, 1, 64});
  expect_as_cpu({1, 385, 2, 1, 50});
  expect_as_cpu({1, 330, 2, 1, 104});
}

TEST_P(CudaAttentionTest, EqualsTheCpuForAllGroupsAndBatches) {
  expect_as_cpu({2, 70, 4, 2, 16});
  expect_as_cpu({3, 33, 3, 1, 40});
  expect_as_cpu({2, 33, 6, 3, 13});
  expect_as_cpu({2, 200, 4, 2, 64});
  expect_as_cpu({1, 140, 3, 1, 100});
}

TEST_P(CudaAttentionTest, EqualsTheCpuWithoutTheCausalMask) {
  for (const std::int64_t tokens : {1, 31, 130}) expect_as_cpu({1, tokens, 2, 1, 64, false});
  expect_as_cpu({2, 70, 1, 1, 128, false});
  expect_as_cpu({1, 290, 2, 1, 40, false});
  expect_as_cpu({1, 321, 1, 1, 61, false});
  expect_as_cpu({1, 128, 1, 1, 61, false});
  expect_as_cpu({1, 257, 1, 1, 128, false});
}

TEST_P(CudaAttentionTest, EqualsTheCpuForDocuments) {
  const auto expect = [](std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                         std::int64_t kv_heads, std::int64_t head_size,
                         const std::vector<std::int64_t>& documents) {
    SCOPED_TRACE(fmt::format("documents of {}", fmt::join(documents, ", ")));
    expect_as_cpu({batch, tokens, heads, kv_heads, head_size, true, 0, documents});
  };
  expect(1, 1, 1, 1, 64, {1});
  expect(1, 140, 1, 1, 96, {1});
  expect(2, 290, 3, 1, 100, {45, 130});
  expect(2, 150, 2, 1, 64, {33, 1, 70});        // across tiles of queries and of keys
  expect(1, 385, 2, 1, 50, {64, 128, 1, 127});  // that begin where tiles do
  expect(1, 600, 1, 1, 64, {260, 340});         // of many tiles, beginning inside of one
  expect(1, 330, 2, 1, 128, {200, 17, 113});
  expect(1, 300, 2, 1, 16, {299, 1});
  expect(2, 140, 1, 1, 13, {1000});  // one in all of a row
}

TEST_P(CudaAttentionTest, GradientIsAddedToWhatIsThere) {
  for (const std::int64_t tokens : {70, 150}) {
    for (const std::int64_t head_size : {13, 64, 100, 128}) {
      std::vector<std::int64_t> documents;
      if (head_size > 64) documents = {tokens / 3, tokens};
      const OpCase op = attention_case({1, tokens, 2, 1, head_size, true, 0, documents});
      expect_f32(op, 2);
      expect_bf16(op, 2);
    }
  }
}

TEST_P(CudaAttentionTest, LargeScoresStayFinite) {
  // Beyond +-100: maxima change by tile. A score of that size is known to 1e-5 only.
  const OpCase op = attention_case({1, 270, 1, 1, 16, true, 6});
  expect_f32(op, 1, 10 * kF32Bound);
  // Far beyond that, and all of them negative for some query: exp(-lse) of what lies after the
  // last key is infinite.
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const OpRun run =
        run_op(attention_case({1, 2, 16, 16, 16, false, 30}), {.dtype = dtype, .on_cuda = true});
    for (const Values& values : {run.y, run.grads[0]})
      for (const double x : values) ASSERT_TRUE(std::isfinite(x)) << name_of(dtype);
  }
}

TEST_P(CudaAttentionTest, BitsDoNotDependOnAlignment) {
  const OpCase op = attention_case({1, 150, 2, 1, 64});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const OpRun aligned = run_op(op, {.dtype = dtype, .on_cuda = true});
    const OpRun moved = run_op(op, {.dtype = dtype, .offset = 1, .on_cuda = true});
    EXPECT_EQ(aligned.y, moved.y);
    EXPECT_EQ(aligned.grads, moved.grads);
  }
}

TEST_P(CudaAttentionTest, BitsDoNotDependOnWhetherItIsRecorded) {
  const OpCase op = attention_case({1, 70, 2, 1, 64});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const OpRun recorded = run_op(op, {.dtype = dtype, .on_cuda = true});
    EXPECT_EQ(run_op(op, {.dtype = dtype, .on_cuda = true, .without_grad = 0}).y, recorded.y);
  }
}

// A copy of the first, whose gradient is that of each.
Tensor copy_of(Tape& tape, const std::vector<Tensor>& x,
               const std::function<void(const Tensor& dy)>& see = {}) {
  const Tensor y = tape.empty(x[0].shape(), x[0].dtype(), "copy");
  launch_assign_or_add(tape.stream(), y, x[0], false, "copy");
  tape.record("copy", y, [&tape, x, see](const Tensor& dy) {
    if (see) see(dy);
    for (const Tensor& each : x) tape.pass_grad(each, dy);
  });
  return y;
}

// The gradient of qkv and the sums of its columns that were left with it.
struct Left {
  Values dqkv, parts;
  Shape shape;  // of parts, if they were left
};

// With the sums wanted, where `num_uses` add to the gradient.
Left left_of(const Case& c, CudaAttention cuda, int num_uses,
             engine::LaunchListener* listener = nullptr) {
  Left left;
  const auto see = [&left](Tape& tape, const Tensor& dy) {
    left.dqkv = to_values(dy);
    const Tensor parts = tape.column_sums(dy);
    if (!parts.defined()) return;
    left.parts = to_values(parts);
    left.shape = parts.shape();
  };
  OpCase op = attention_case(c, cuda);
  op.build = [&, build = op.build](Tape& tape, const auto& x, auto& p) {
    const Tensor qkv = copy_of(tape, x, [&](const Tensor& dy) { see(tape, dy); });
    tape.want_column_sums(qkv);
    std::vector<Tensor> ys;
    for (int u = 0; u < num_uses; ++u) ys.push_back(build(tape, {qkv}, p));
    return copy_of(tape, ys);
  };
  run_op(op, {.dtype = DType::kBF16, .on_cuda = true, .listener = listener});
  return left;
}

// Those of each 64 rows of a sample, as they are stored, but for the order of additions.
void expect_sums(const Left& left, const Case& c) {
  const std::int64_t width = (c.heads + 2 * c.kv_heads) * c.head_size;
  const std::int64_t parts_each = (c.tokens + 63) / 64;
  ASSERT_EQ(left.shape, Shape({c.batch * parts_each, width}));
  const auto at = [&](const Values& values, std::int64_t row, std::int64_t column) {
    return values[static_cast<std::size_t>(row * width + column)];
  };
  for (std::int64_t part = 0; part < c.batch * parts_each; ++part) {
    const std::int64_t sample = part / parts_each, begin = part % parts_each * 64;
    for (std::int64_t column = 0; column < width; ++column) {
      double sum = 0, size = 0;
      for (std::int64_t t = begin; t < std::min(begin + 64, c.tokens); ++t) {
        const double x = at(left.dqkv, sample * c.tokens + t, column);
        sum += x, size += std::abs(x);
      }
      ASSERT_NEAR(at(left.parts, part, column), sum, 1e-6 * size)
          << "part " << part << ", column " << column;
    }
  }
}

TEST_P(CudaAttentionTest, LeavesTheSumsOfTheColumnsOfItsGradient) {
  // Tokens at the ends of the rows of a warp, of a warpgroup and of a block; groups, both sizes of
  // tiles, and heads whose rows are not moved 16 bytes at a time.
  for (const Case& c :
       {Case{1, 1, 1, 1, 64}, Case{2, 64, 2, 1, 64}, Case{1, 65, 1, 1, 61}, Case{2, 300, 2, 1, 64},
        Case{1, 140, 4, 2, 64}, Case{1, 205, 1, 1, 50, false}, Case{1, 384, 1, 1, 64, false},
        Case{2, 17, 1, 1, 128}, Case{2, 200, 2, 1, 128}, Case{1, 330, 1, 1, 104},
        Case{1, 321, 1, 1, 101, false}, Case{1, 130, 4, 2, 100},
        Case{2, 300, 2, 1, 64, true, 0, {33, 150}}, Case{1, 330, 1, 1, 104, true, 0, {100, 61}}}) {
    SCOPED_TRACE(fmt::format("B{} T{} H{} KV{} D{} {}", c.batch, c.tokens, c.heads, c.kv_heads,
                             c.head_size, c.causal ? "causal" : "full"));
    LastWorks last;
    const Left left = left_of(c, GetParam(), 1, &last);
    // Two bytes an element of dqkv, four of a sum.
    EXPECT_EQ(last.works["attention.backward"].bytes_written,
              std::ssize(left.dqkv) * 2 + std::ssize(left.parts) * 4);
    if (GetParam() == CudaAttention::kMma) {
      EXPECT_TRUE(left.parts.empty());
      continue;
    }
    expect_sums(left, c);
    EXPECT_EQ(left_of(c, GetParam(), 1).parts, left.parts) << "run twice";
    EXPECT_EQ(run_op(attention_case(c), {.dtype = DType::kBF16, .on_cuda = true}).grads[0],
              left.dqkv)
        << "not wanted";
    expect_sums(left_of(c, GetParam(), 2), c);
  }
}

TEST_P(CudaAttentionTest, RefusesLargeHeads) {
  const auto run = [] { run_op(attention_case({1, 3, 1, 1, 129}), {.on_cuda = true}); };
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>(run), {"at most 128 on cuda:0", "got 129"}));
}

// Launches nothing. Those that the GPU refuses are left out; without a GPU all are tried, and fail.
std::string refusal_of_wgmma() {
  try {
    require_attention_kernels(engine::Stream::cuda("compute", 0), CudaAttention::kWgmma);
  } catch (const engine::InvalidArgument& error) {
    return error.what();
  } catch (const engine::DeviceError&) {
  }
  return {};
}

std::vector<CudaAttention> kernels() {
  if (!refusal_of_wgmma().empty()) return {CudaAttention::kMma};
  return {CudaAttention::kMma, CudaAttention::kWgmma};
}

// Wherever there is a GPU.
TEST(CudaAttentionWgmma, IsRefusedForItsComputeCapabilityAlone) {
  const std::string refusal = refusal_of_wgmma();
  const auto run = [] {
    run_op(attention_case({1, 1, 1, 1, 64}, CudaAttention::kWgmma),
           {.dtype = DType::kBF16, .on_cuda = true});
  };
  if (refusal.empty()) {
    EXPECT_NO_THROW(run());
  } else {
    EXPECT_TRUE(has(refusal, {"compute capability 9.x for wgmma", "cuda:0"})) << refusal;
    EXPECT_EQ(error_of<engine::InvalidArgument>(run), refusal);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaAttentionTest, ::testing::ValuesIn(kernels()),
                         [](const auto& param) {
                           return param.param == CudaAttention::kMma ? "Mma" : "Wgmma";
                         });

}  // namespace
}  // namespace tessera::ops

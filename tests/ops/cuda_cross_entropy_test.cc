// Cross-entropy on a GPU, plain and fused with its projection, against the CPU; and what only a GPU
// does: padded and chunked logits, bad targets that cannot throw.
#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "engine/copy.h"
#include "ops/add.h"
#include "tests/ops/naive_cross_entropy.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::Stream;

constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;

// Exponentials and sums differ in the last bits. With bf16 the fused op rounds logits and softmax -
// onehot, where the CPU keeps f32. FusedRoundsAsStated is exact about that.
constexpr CudaBounds kLogitsBounds{.f32 = 3e-6, .bf16 = 3e-6};
constexpr CudaBounds kLinearBounds{.f32 = 1e-5, .bf16 = 0x1p-5};

TEST(CudaCrossEntropyTest, OfLogitsIsThatOfTheCpu) {
  for (const auto& [rows, vocab_size] : {std::pair{37, 307}, {33, 304}, {1, 7}, {2, 1}, {31, 8}})
    check_cuda(cross_entropy_case(some_targets(rows, vocab_size), vocab_size), kLogitsBounds);
  check_cuda_run(cross_entropy_case(some_targets(37, 307), 307, 30.0f), {}, kLogitsBounds);
  check_cuda_run(cross_entropy_case(some_targets(4, 50257), 50257), {}, kLogitsBounds);
  for (const DType dtype : {kF32, kBF16})
    check_cuda_run(cross_entropy_case(some_targets(1025, 10), 10), {.dtype = dtype}, kLogitsBounds);
}

// A row that one loss ignores keeps the gradient of the other.
TEST(CudaCrossEntropyTest, GradientsOfTwoLossesAreAdded) {
  const Targets some = some_targets(37, 307);
  Targets others = some;
  std::rotate(others.begin(), others.begin() + 1, others.end());
  const OpCase op{.inputs = {{37, 307}}, .build = [=](Tape& tape, const auto& x, auto&) {
                    const Tensor first = cross_entropy(tape, x[0], to_targets(tape.memory(), some));
                    return add(tape, first,
                               cross_entropy(tape, x[0], to_targets(tape.memory(), others)));
                  }};
  check_cuda(op, kLogitsBounds);
}

TEST(CudaCrossEntropyTest, FusedIsThatOfTheCpu) {
  for (const LinearCrossEntropyOptions& options : {LinearCrossEntropyOptions{},
                                                   {.chunk_rows = 16},
                                                   {.chunk_rows = 16, .max_saved_numel = 0},
                                                   {.chunk_rows = 7, .max_saved_numel = 0},
                                                   {.is_sum = true},
                                                   {.is_sum = true, .max_saved_numel = 0}}) {
    SCOPED_TRACE(fmt::format("{}{} rows, {} saved", options.is_sum ? "sum, " : "",
                             options.chunk_rows, options.max_saved_numel));
    check_cuda(linear_case(some_targets(37, 307), 307, 24, options), kLinearBounds);
  }
  check_cuda(linear_case(some_targets(33, 13), 13, 5), kLinearBounds);
  check_cuda(linear_case(some_targets(1, 31), 31, 8), kLinearBounds);
  check_cuda_run(linear_case(some_targets(3, 50257), 50257, 8), {.dtype = kBF16}, kLinearBounds);
}

double round_to_bf16(double x) {
  return engine::BFloat16::from_float(static_cast<float>(x)).to_float();
}

// Apart from a logit on the verge of two roundings, f32 sums and exponentials change nothing. Of
// more rows than an H100 has units each block takes some, the next on its way.
TEST(CudaCrossEntropyTest, FusedRoundsAsStated) {
  for (const auto& [rows, vocab_size, width] :
       {std::tuple{37, 307, 24}, {33, 320, 24}, {600, 307, 24}, {1, 13, 5}, {3, 50257, 8}}) {
    for (const std::int64_t max_saved_numel : {-1, 0}) {
      for (const float scale : {1.0f, 3.0f}) {
        SCOPED_TRACE(fmt::format("{} words, {} saved, {}", vocab_size, max_saved_numel, scale));
        const Targets targets = some_targets(rows, vocab_size);
        const OpRun run = run_op(
            linear_case(targets, vocab_size, width, {.max_saved_numel = max_saved_numel}, scale),
            {.dtype = kBF16, .grad_dtype = kF32, .on_cuda = true});
        const NaiveLinear rounded =
            naive_linear_cross_entropy(run, targets, kIgnore, round_to_bf16);
        expect_as_on_cpu(run.y, {rounded.loss}, 1e-4, kF32, "loss");
        expect_as_on_cpu(run.grads[0], rounded.dx, 1e-4, kBF16, "dx");
        expect_as_on_cpu(run.grads[1], rounded.dw, 1e-4, kF32, "dw");
        const NaiveLinear exact =
            naive_linear_cross_entropy(run, targets, kIgnore, round_to_nothing);
        EXPECT_LE(std::abs(run.y[0] - exact.loss), 0x1p-8 * exact.max_logit);
      }
    }
  }
}

// One chunk: equal products, in backward or in forward. What forward makes of dx is rounded before
// it is scaled, and so once more.
TEST(CudaCrossEntropyTest, GradientsMadeInForwardAreThoseOfBackward) {
  for (const auto& [rows, dtype] : {std::pair{32, kF32}, {32, kBF16}, {600, kF32}, {600, kBF16}}) {
    SCOPED_TRACE(fmt::format("{} rows, {}", rows, name_of(dtype)));
    const RunOptions options{.dtype = dtype, .grad_dtype = kF32, .on_cuda = true};
    const Targets targets = some_targets(rows, 64);
    const OpRun late = run_op(linear_case(targets, 64, 16), options);
    const OpRun early = run_op(linear_case(targets, 64, 16, {.max_saved_numel = 0}), options);
    EXPECT_EQ(late.y, early.y);
    EXPECT_EQ(late.grads[1], early.grads[1]);
    const double rounding = dtype == kF32 ? 0 : 0x1p-7;
    for (std::size_t i = 0; i < late.grads[0].size(); ++i) {
      const double dx = late.grads[0][i];
      EXPECT_LE(std::abs(dx - early.grads[0][i]), rounding * std::abs(dx)) << "element " << i;
    }
  }
}

TEST(CudaCrossEntropyTest, AllIgnoredIsZero) {
  const Targets targets(5, kIgnore);
  for (const OpCase& op : {cross_entropy_case(targets, 31), linear_case(targets, 31, 6),
                           linear_case(targets, 31, 6, {.chunk_rows = 2, .max_saved_numel = 0})})
    for (const int num_uses : {1, 2}) {
      const OpRun run = run_op(op, {.num_uses = num_uses, .on_cuda = true});
      EXPECT_EQ(run.y, Values{0});
      for (const Values& grad : run.grads) EXPECT_EQ(max_abs(grad), 0);
    }
}

TEST(CudaCrossEntropyTest, MaskedLogitsHaveNoGradient) {
  constexpr std::int64_t kRows = 3, kVocab = 21;
  const std::vector<float> logits = random_values(kRows * kVocab, 0);
  Targets targets(kRows);
  for (std::int64_t i = 0; i < kRows; ++i)  // the first that is not masked
    while (logits[static_cast<std::size_t>(i * kVocab + targets[static_cast<std::size_t>(i)])] > 0)
      ++targets[static_cast<std::size_t>(i)];
  OpCase op = cross_entropy_case(targets, kVocab);
  op.transform = [](float x) { return x > 0 ? -std::numeric_limits<float>::infinity() : x; };
  for (const DType dtype : {kF32, kBF16}) {
    const OpRun run = check_cuda_run(op, {.dtype = dtype}, kLogitsBounds);
    EXPECT_TRUE(std::isfinite(run.y[0]));
  }
}

TEST(CudaCrossEntropyTest, BadTargetsMakeTheLossNaN) {
  for (const std::int32_t bad : {31, -1, std::numeric_limits<std::int32_t>::max(),
                                 std::numeric_limits<std::int32_t>::min()}) {
    const Targets targets = {3, bad, 30, kIgnore};
    for (const OpCase& op :
         {cross_entropy_case(targets, 31), linear_case(targets, 31, 6),
          linear_case(targets, 31, 6, {.chunk_rows = 1, .max_saved_numel = 0})}) {
      const OpRun run = run_op(op, {.on_cuda = true});
      EXPECT_TRUE(std::isnan(run.y[0])) << bad;
      const std::size_t width = run.grads[0].size() / targets.size();
      for (std::size_t i = 0; i < run.grads[0].size(); ++i)
        EXPECT_EQ(std::isnan(run.grads[0][i]), i / width == 1) << bad << ", element " << i;
    }
  }
}

TEST(CudaCrossEntropyTest, NaNLogitsMakeTheLossNaN) {
  OpCase op = cross_entropy_case({1, 0}, 21);
  op.transform = [](float) { return std::numeric_limits<float>::quiet_NaN(); };
  EXPECT_TRUE(std::isnan(run_op(op, {.on_cuda = true}).y[0]));
}

// A chunk at a time lives: without a gradient, and with one where logits are not saved; then dx, dw
// and what the tape makes of them do besides.
TEST(CudaCrossEntropyTest, FusedHoldsAChunkOfLogits) {
  constexpr std::int64_t kRows = 64, kVocab = 1000, kWidth = 8, kChunk = 8;
  const Stream stream = Stream::cuda("compute", 0);
  Memory memory(stream);
  Tape tape(memory, stream);
  const Tensor x = to_tensor(memory, {kRows, kWidth}, random_values(kRows * kWidth, 1), kF32);
  Parameter w{.name = "w", .shape = {kVocab, kWidth}};
  w.value = to_tensor(memory, w.shape, random_values(kVocab * kWidth, 2), kF32);
  w.grad = to_tensor(memory, w.shape, random_values(kVocab * kWidth, 3), kF32);
  const Tensor targets = to_targets(memory, some_targets(kRows, kVocab));
  const auto peak_nbytes = [&](const auto& run) {
    memory.reset_peaks();
    const std::int64_t before = memory.stats().total_nbytes;
    run();
    return memory.stats().peak_total_nbytes - before;
  };
  const LinearCrossEntropyOptions options{.chunk_rows = kChunk, .max_saved_numel = 0};
  const auto loss = [&] { return linear_cross_entropy(tape, x, w, targets, options); };
  EXPECT_LT(peak_nbytes([&] { tape.no_grad(loss); }), 3 * kChunk * kVocab * 4);
  const std::int64_t dx_and_dw = (kRows + kVocab) * kWidth * 4;
  EXPECT_LT(peak_nbytes([&] {
              tape.watch(x);
              tape.backward(loss());
            }),
            3 * kChunk * kVocab * 4 + 2 * dx_and_dw);
}

}  // namespace
}  // namespace tessera::ops

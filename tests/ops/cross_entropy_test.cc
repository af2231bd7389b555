// Cross-entropy, plain and fused with its projection, against a naive reference in double
// precision; and what chunks and recomputation must not change.
#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "tests/ops/naive_cross_entropy.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

// Compares one run of linear_case() with the reference.
void expect_naive_linear(std::int64_t rows, std::int64_t vocab_size, std::int64_t width,
                         const LinearCrossEntropyOptions& options) {
  const Targets targets = some_targets(rows, vocab_size, options.ignore_index);
  const OpRun run = run_op(linear_case(targets, vocab_size, width, options));
  const NaiveLinear want = naive_linear_cross_entropy(run, targets, options.ignore_index,
                                                      round_to_nothing, options.is_sum);
  expect_close(run.y, {want.loss}, 2e-6, "loss");
  // Sums over the vocabulary, which a library may make one element after the other.
  const double longer = std::max(1.0, static_cast<double>(vocab_size) / 4096);
  expect_close(run.grads[0], want.dx, 1e-5 * std::sqrt(longer), "dx");
  expect_close(run.grads[1], want.dw, 1e-5, "dw");
}

// dlogits as the op gives them.
Values scaled(const NaiveLoss& naive, double dloss) {
  Values dlogits = naive.dlogits;
  for (double& d : dlogits) d *= naive.weight * dloss;
  return dlogits;
}

TEST(CrossEntropyTest, EqualsTheReference) {
  for (const auto& [rows, vocab_size] : {std::pair{37, 307}, {4, 50257}, {2, 1}, {1, 7}}) {
    for (const float scale : {1.0f, 30.0f}) {
      const Targets targets = some_targets(rows, vocab_size);
      const OpRun run = run_op(cross_entropy_case(targets, vocab_size, scale));
      const NaiveLoss want = naive_cross_entropy(run.leaves[0], targets, kIgnore);
      expect_close(run.y, {want.loss}, 1e-6, "loss");
      expect_close(run.grads[0], scaled(want, run.dy[0]), 3e-6, "dlogits");
    }
  }
}

TEST(CrossEntropyTest, IgnoresTheIndexItIsGiven) {
  const Targets targets = some_targets(9, 20, 5);
  const OpRun run = run_op(cross_entropy_case(targets, 20, 1, 5));
  const NaiveLoss want = naive_cross_entropy(run.leaves[0], targets, 5);
  expect_close(run.y, {want.loss}, 1e-6, "loss");
  expect_close(run.grads[0], scaled(want, run.dy[0]), 3e-6, "dlogits");
}

// dy of each row is another.
TEST(CrossEntropyTest, LossesOfRowsEqualTheReference) {
  for (const auto& [rows, vocab_size] : {std::pair{37, 307}, {4, 50257}, {2, 1}, {1, 7}}) {
    for (const std::int32_t ignore : {kIgnore, 5}) {
      const Targets targets = some_targets(rows, vocab_size, ignore);
      const OpRun run = run_op(cross_entropy_rows_case(targets, vocab_size, 3, ignore));
      const NaiveLoss want = naive_cross_entropy(run.leaves[0], targets, ignore);
      expect_close(run.y, want.rows, 1e-6, "losses");
      Values dlogits = want.dlogits;
      for (std::size_t i = 0; i < dlogits.size(); ++i)
        dlogits[i] *= run.dy[i / static_cast<std::size_t>(vocab_size)];
      expect_close(run.grads[0], dlogits, 3e-6, "dlogits");
    }
  }
}

// The mean, and its gradient, from losses of rows of two dimensions.
TEST(CrossEntropyTest, LossesOfRowsHaveTheShapeOfTheirTargets) {
  const Memory memory({.poison = true});
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = to_tensor(memory, {2, 3, 7}, random_values(42, 1), DType::kF32);
  const Tensor targets =
      Tensor::from<std::int32_t>(memory, {2, 3}, Targets{1, kIgnore, 6, 0, 3, 3}, "targets");
  const Tensor losses = cross_entropy_rows(tape, x, targets);
  EXPECT_EQ(losses.shape(), (Shape{2, 3}));
  double sum = 0;
  for (const double loss : to_values(losses)) sum += loss;
  EXPECT_NEAR(cross_entropy(tape, x, targets).item(), sum / 5, 1e-6);
}

// Where its target is ignored, whatever the gradient of its loss is.
TEST(CrossEntropyTest, IgnoredRowsHaveNoGradient) {
  const Memory memory({.poison = true});
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = to_tensor(memory, {2, 3}, random_values(6, 1), DType::kF32);
  tape.watch(x);
  const Tensor losses = cross_entropy_rows(tape, x, to_targets(memory, {kIgnore, 1}));
  EXPECT_EQ(to_values(losses)[0], 0);
  const Tensor loss = tape.empty({}, DType::kF32, "loss");
  tape.record("loss", loss, [&](const Tensor&) {
    tape.pass_grad(losses, to_tensor(memory, {2}, {NAN, 1}, DType::kF32));
  });
  tape.backward(loss);
  const Values dx = to_values(tape.grad(x));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(dx[i], 0);
  EXPECT_NEAR(dx[3] + dx[4] + dx[5], 0, 1e-6);
  EXPECT_LT(dx[4], 0);
}

TEST(CrossEntropyTest, GradientsMatchDifferences) {
  check_gradients(cross_entropy_rows_case(some_targets(9, 20), 20));
  check_gradients(cross_entropy_case(some_targets(9, 20), 20));
  check_gradients(linear_case(some_targets(9, 20), 20, 6));
  check_gradients(linear_case(some_targets(9, 20), 20, 6, {.chunk_rows = 4, .max_saved_numel = 0}));
}

TEST(CrossEntropyTest, BFloat16MatchesF32) {
  check_bf16(cross_entropy_rows_case(some_targets(9, 40), 40));
  check_bf16(cross_entropy_case(some_targets(9, 40), 40));
  check_bf16(linear_case(some_targets(9, 40), 40, 6));
  check_bf16(linear_case(some_targets(9, 40), 40, 6, {.chunk_rows = 4, .max_saved_numel = 0}));
}

// Of 3 x 5 logits: an exponential and three more operations each; a row has a target and two
// numbers that are saved.
TEST(CrossEntropyTest, StatesItsWork) {
  for (const int num_uses : {1, 2}) {
    LastWorks works;
    run_op(cross_entropy_case(some_targets(3, 5), 5), {.num_uses = num_uses, .listener = &works});
    works.expect("cross_entropy.forward", 15 * 22, 60 + 12, 24 + 4);
    works.expect("cross_entropy.backward", 15 * 22, 60 * num_uses + 12 + 24, 60);
    run_op(cross_entropy_rows_case(some_targets(3, 5), 5),
           {.num_uses = num_uses, .listener = &works});
    works.expect("cross_entropy_rows.forward", 15 * 22, 60 + 12, 24 + 12);
    works.expect("cross_entropy_rows.backward", 15 * 22, 60 * num_uses + 12 + 24 + 12, 60);
  }
}

TEST(LinearCrossEntropyTest, EqualsTheReferenceInChunksOfAnySize) {
  for (const std::int64_t chunk_rows : {0, 1, 7, 16, 37, 1000}) {
    SCOPED_TRACE(chunk_rows);
    expect_naive_linear(37, 307, 24, {.chunk_rows = chunk_rows});
    expect_naive_linear(37, 307, 24, {.chunk_rows = chunk_rows, .max_saved_numel = 0});
  }
  expect_naive_linear(4, 50257, 8, {.ignore_index = -1});
}

TEST(LinearCrossEntropyTest, ASumIsNotDividedByTheNumberOfTargets) {
  for (const std::int64_t max_saved_numel : {-1, 0}) {
    expect_naive_linear(37, 307, 24,
                        {.is_sum = true, .chunk_rows = 16, .max_saved_numel = max_saved_numel});
  }
}

TEST(LinearCrossEntropyTest, SavedAndRecomputedGiveTheSameBits) {
  for (const std::int64_t chunk_rows : {0, 16}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const RunOptions options{.dtype = dtype, .grad_dtype = dtype};
      const OpRun saved =
          run_op(linear_case(some_targets(37, 307), 307, 24,
                             {.chunk_rows = chunk_rows, .max_saved_numel = 37 * 307}),
                 options);
      const OpRun recomputed =
          run_op(linear_case(some_targets(37, 307), 307, 24,
                             {.chunk_rows = chunk_rows, .max_saved_numel = 37 * 307 - 1}),
                 options);
      EXPECT_EQ(saved.y, recomputed.y);
      EXPECT_EQ(saved.grads, recomputed.grads);
    }
  }
}

TEST(LinearCrossEntropyTest, SameBitsTwice) {
  const OpCase op = linear_case(some_targets(37, 307), 307, 24, {.chunk_rows = 10});
  const OpRun one = run_op(op), other = run_op(op);
  EXPECT_EQ(one.y, other.y);
  EXPECT_EQ(one.grads, other.grads);
}

TEST(LinearCrossEntropyTest, ChunksBoundTheMemory) {
  constexpr std::int64_t kRows = 512, kVocab = 1000, kWidth = 16, kChunk = 64;
  const auto peak_nbytes = [&](std::int64_t max_saved_numel) {
    const Memory memory;
    Tape tape(memory, Stream::inline_cpu("compute"));
    engine::Parameter w{.name = "w", .shape = {kVocab, kWidth}, .init = engine::Init::normal(1)};
    engine::materialize({&w}, memory, 1);
    const Tensor x = Tensor::zeros(memory, {kRows, kWidth}, DType::kF32);
    tape.watch(x);
    const Tensor targets = to_targets(memory, some_targets(kRows, kVocab));
    const std::int64_t before = memory.stats().total_nbytes;
    tape.backward(linear_cross_entropy(tape, x, w, targets,
                                       {.chunk_rows = kChunk, .max_saved_numel = max_saved_numel}));
    return memory.stats().peak_total_nbytes - before;
  };
  const std::int64_t small = kRows * kWidth * 4 + kRows * 8 + 64;  // dx, two numbers a row, losses
  EXPECT_LE(peak_nbytes(0), kChunk * kVocab * 4 + small);
  EXPECT_GE(peak_nbytes(kRows * kVocab), kRows * kVocab * 4);
  EXPECT_LE(peak_nbytes(kRows * kVocab), kRows * kVocab * 4 + small);
}

class BothTest : public ::testing::Test {
 protected:
  // The losses of both ops on the same logits: w is the identity.
  std::vector<Tensor> losses(const Targets& targets) {
    const Tensor t = to_targets(memory, targets);
    return {cross_entropy(tape, x, t), linear_cross_entropy(tape, x, w, t)};
  }
  void SetUp() override {
    engine::materialize({&w}, memory, 1);
    for (std::int64_t i = 0; i < 4; ++i) w.value.data<float>()[i * 4 + i] = 1;
    tape.watch(x);
  }
  Memory memory{{.poison = true}};
  Tape tape{memory, Stream::inline_cpu("compute")};
  engine::Parameter w{.name = "w", .shape = {4, 4}};
  Tensor x = Tensor::from<float>(memory, {3, 4},
                                 std::vector<float>{1e4f, 0, -1e4f, 3, 1, 2, 3, 4, 0, 0, 0, 0});
};

TEST_F(BothTest, LargeLogitsAreStable) {
  for (const Tensor& loss : losses({0, 3, 2}))
    EXPECT_NEAR(loss.item(), (0 + 0.4401897 + std::log(4)) / 3, 1e-6);
  for (const Tensor& loss : losses({2, kIgnore, kIgnore})) EXPECT_EQ(loss.item(), 2e4f);
}

TEST_F(BothTest, AllIgnoredIsZeroWithZeroGradients) {
  const auto both = losses({kIgnore, kIgnore, kIgnore});
  EXPECT_EQ(both[0].item(), 0);
  EXPECT_EQ(both[1].item(), 0);
  tape.backward(both[0]);  // entries of both run; only the first loss has a gradient
  EXPECT_EQ(to_values(tape.grad(x)), Values(12, 0));
  tape.clear();
  tape.watch(x);
  tape.backward(losses({kIgnore, kIgnore, kIgnore})[1]);
  EXPECT_EQ(to_values(tape.grad(x)), Values(12, 0));
  EXPECT_EQ(to_values(w.grad), Values(16, 0));
  EXPECT_EQ(linear_cross_entropy(tape, x, w, to_targets(memory, {kIgnore, kIgnore, kIgnore}),
                                 {.is_sum = true})
                .item(),
            0);
}

TEST_F(BothTest, RefusedTargetIsNamed) {
  for (const std::int32_t target : {-1, 4, -101}) {
    const Tensor targets = to_targets(memory, {0, target, 1});
    const std::string message = "[cross_entropy] expected a target in [0, 4) or -100, got " +
                                std::to_string(target) + " at position 1 (targets)";
    for (const auto op : {cross_entropy, cross_entropy_rows}) {
      try {
        op(tape, x, targets, kIgnore);
        FAIL() << "expected InvalidArgument";
      } catch (const InvalidArgument& e) {
        EXPECT_EQ(e.what(), message);
      }
    }
    try {
      linear_cross_entropy(tape, x, w, targets);
      FAIL() << "expected InvalidArgument";
    } catch (const InvalidArgument& e) {
      EXPECT_EQ(e.what(), message);
    }
  }
}

TEST_F(BothTest, RefusesShapesThatDoNotFit) {
  EXPECT_THROW(losses({0, 1}), InvalidArgument);
  for (const auto op : {cross_entropy, cross_entropy_rows}) {
    EXPECT_THROW(op(tape, x, to_targets(memory, {0, 1}), kIgnore), InvalidArgument);
    EXPECT_THROW(op(tape, x, Tensor::zeros(memory, {3}, DType::kF32), kIgnore), InvalidArgument);
    EXPECT_THROW(op(tape, Tensor::zeros(memory, {}, DType::kF32), to_targets(memory, {0}), kIgnore),
                 InvalidArgument);
    EXPECT_THROW(op(tape, Tensor::zeros(memory, {1, 4}, DType::kI32), to_targets(memory, {0}), 0),
                 InvalidArgument);
  }
  // As many, of a batch whose dimensions are in another order.
  const Tensor logits = Tensor::zeros(memory, {2, 3, 4}, DType::kF32);
  const Tensor other = to_targets(memory, {0, 1, 2, 3, 0, 1});
  for (const auto op : {cross_entropy, cross_entropy_rows}) {
    EXPECT_THROW(op(tape, logits, other.reshape({3, 2}), kIgnore), InvalidArgument);
    op(tape, logits, other.reshape({2, 3}), kIgnore);
    op(tape, logits, other, kIgnore);
  }
  const Tensor targets = to_targets(memory, {0, 1, 2});
  EXPECT_THROW(linear_cross_entropy(tape, x, w, targets, {.chunk_rows = -1}), InvalidArgument);
  EXPECT_THROW(linear_cross_entropy(tape, x.reshape({4, 3}), w, to_targets(memory, {0, 1, 2, 3})),
               InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops

// Cross-entropy with a weight for each class against a naive reference in double precision, and
// against numbers that PyTorch's formula gives.
#include "ops/losses/weighted_cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "ops/cross_entropy.h"
#include "ops/mul.h"
#include "tests/ops/naive_cross_entropy.h"
#include "tests/testing/errors.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Stream;

TEST(WeightedCrossEntropy, EqualsTheReference) {
  for (const auto& [rows, num_classes] : {std::pair{37, 307}, {4, 5025}, {2, 1}, {1, 7}}) {
    for (const std::int32_t ignore : {kIgnore, 5}) {
      SCOPED_TRACE(fmt::format("{} rows of {}, without {}", rows, num_classes, ignore));
      const Targets targets = some_targets(rows, num_classes, ignore);
      const OpRun run = run_op(weighted_case(targets, num_classes, ignore));
      const std::vector<float> of_class = some_class_weights(num_classes);
      const NaiveLoss naive = naive_cross_entropy(run.leaves[0], targets, ignore);
      double loss = 0, total = 0;
      Values dlogits = naive.dlogits;
      for (std::size_t i = 0; i < targets.size(); ++i) {
        const bool counts = targets[i] != ignore;
        const double w = counts ? of_class[static_cast<std::size_t>(targets[i])] : 0;
        loss += w * naive.rows[i];
        total += w;
        const auto width = static_cast<std::size_t>(num_classes);
        for (std::size_t v = 0; v < width; ++v) dlogits[i * width + v] *= w * run.dy[0];
      }
      for (double& d : dlogits) d /= total;
      expect_close(run.y, {loss / total}, 1e-6, "loss");
      expect_close(run.grads[0], dlogits, 3e-6, "dlogits");
    }
  }
}

TEST(WeightedCrossEntropy, GradientsMatchDifferences) {
  check_gradients(weighted_case(some_targets(9, 20), 20));
  check_bf16(weighted_case(some_targets(9, 40), 40));
}

class ByHand : public ::testing::Test {
 protected:
  Tensor logits(const std::vector<float>& values) const {
    return Tensor::from<float>(memory, {std::ssize(values) / 3, 3}, values, "logits");
  }
  Tensor weights(const std::vector<float>& values) const {
    return Tensor::from<float>(memory, {std::ssize(values)}, values, "class_weights");
  }
  Memory memory{{.poison = true}};
  Tape tape{memory, Stream::inline_cpu("compute")};
};

// torch.nn.functional.cross_entropy(x, y, weight=[1, 2, 0.5], ignore_index=-100, reduction=...).
TEST_F(ByHand, ReductionsAreThoseOfPyTorch) {
  const Tensor x = logits({1, 2, 3, 1, 2, 3, 0, 0, 0, 5, 5, 5});
  const Tensor y = to_targets(memory, {0, 2, 1, kIgnore});
  const Tensor w = weights({1, 2, 0.5f});
  const double of_first = std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0)) - 1;
  const Values rows = {of_first, 0.5 * (of_first - 2), 2 * std::log(3.0), 0};
  const Tensor each = mul(tape, cross_entropy_rows(tape, x, y), target_weights(tape, w, y));
  expect_close(to_values(each), rows, 1e-6, "none");
  EXPECT_NEAR(weighted_cross_entropy(tape, x, y, w).item(), (rows[0] + rows[1] + rows[2]) / 3.5,
              1e-6);
  EXPECT_EQ(to_values(target_weights(tape, w, y)), (Values{1, 0.5, 2, 0}));
}

// Weights are of the shape of targets; those of the ignored count for nothing, also where the index
// is that of a class.
TEST_F(ByHand, WeightsAreThoseOfTheTargets) {
  const Tensor y = Tensor::from<std::int32_t>(memory, {2, 3}, Targets{2, 0, 1, 1, 2, 2}, "targets");
  const Tensor w = target_weights(tape, weights({3, 5, 7}), y, /*ignore_index=*/1);
  EXPECT_EQ(w.shape(), (Shape{2, 3}));
  EXPECT_EQ(to_values(w), (Values{7, 3, 0, 0, 7, 7}));
}

TEST_F(ByHand, EqualWeightsAreNone) {
  const Tensor x = logits({1, 2, 3, -1, 0, 4, 0, 2, 0});
  const Tensor y = to_targets(memory, {0, kIgnore, 1});
  const float plain = cross_entropy(tape, x, y).item();
  for (const float weight : {1.0f, 0.125f, 6.0f}) {
    const Tensor w = weights(std::vector(3, weight));
    EXPECT_NEAR(weighted_cross_entropy(tape, x, y, w).item(), plain, 1e-6 * plain);
  }
}

// All are ignored, or all classes that are there weigh nothing.
TEST_F(ByHand, WithoutWeightItIsZeroWithZeroGradients) {
  for (const Targets& targets : {Targets{kIgnore, kIgnore}, Targets{1, 1}, Targets{kIgnore, 1}}) {
    const Tensor x = logits({1, 2, 3, 4, 5, -6});
    tape.watch(x);
    const Tensor loss =
        weighted_cross_entropy(tape, x, to_targets(memory, targets), weights({2, 0, 3}));
    EXPECT_EQ(loss.item(), 0);
    tape.backward(loss);
    EXPECT_EQ(to_values(tape.grad(x)), Values(6, 0));
  }
}

TEST_F(ByHand, RefusesWhatDoesNotFit) {
  const Tensor x = logits({1, 2, 3, 4, 5, 6}), y = to_targets(memory, {0, 1});
  const Tensor w = weights({1, 2, 3});
  const auto refuses = [&](std::initializer_list<std::string_view> text, const auto& call) {
    EXPECT_TRUE(has(error_of<InvalidArgument>(call), text));
  };
  refuses({"expected a weight for each class of (2, 3), got (2) (class_weights)"}, [&] {
    weighted_cross_entropy(tape, x, y, weights({1, 2}));
  });
  refuses({"expected a weight for each class"},
          [&] { weighted_cross_entropy(tape, Tensor::zeros(memory, {}, DType::kF32), y, w); });
  refuses({"expected a target for each row"},
          [&] { weighted_cross_entropy(tape, x, to_targets(memory, {0}), w); });
  refuses({"[target_weights] expected a target in [0, 3) or -100, got 3 at position 1 (targets)"},
          [&] {
            target_weights(tape, w, to_targets(memory, {2, 3}));
          });
  refuses({"[target_weights] expected a target in [0, 3) or -100, got -1 at position 0 (targets)"},
          [&] {
            target_weights(tape, w, to_targets(memory, {-1, 3}));
          });
  refuses({"expected targets i32, got f32 (class_weights)"}, [&] { target_weights(tape, w, w); });
  refuses({"expected weights of classes (V) f32, got f32 (2, 3) (logits)"},
          [&] { target_weights(tape, x, y); });
  refuses({"expected weights of classes (V) f32, got bf16"},
          [&] { target_weights(tape, Tensor::zeros(memory, {3}, DType::kBF16), y); });
  tape.watch(w);
  refuses({"are data", "(class_weights)", "stop_gradient"},
          [&] { weighted_cross_entropy(tape, x, y, w); });
}

}  // namespace
}  // namespace tessera::ops

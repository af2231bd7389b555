// Optimizers against closed forms in double.
#include "shard/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "comm/threads.h"
#include "shard/adamw.h"
#include "shard/sgd.h"
#include "tests/shard/toy_model.h"

namespace tessera::shard {
namespace {

using engine::Tensor;

// Runs `steps` updates with a given gradient of `scale` (dy/dscale of a toy model of no blocks is
// 2 x scale) and returns the parameter after each, beside its gradients.
struct Trace {
  std::vector<double> parameter, gradient;
};

Trace trace(const std::function<std::unique_ptr<Optimizer>(Fsdp&)>& make, int steps, double lr,
            double clip, const engine::Shape& shape) {
  Trace result;
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    const auto compute = engine::Stream::inline_cpu("compute");
    engine::Tape tape(memory, compute);
    testing::ToyModel model(0, 1);
    model.scale.shape = shape;
    Fsdp fsdp(world, memory, compute, {}, &model.root, {});
    const auto optimizer = make(fsdp);
    fsdp.load(model.scale, std::vector<float>{1.5f});
    fsdp.parameters_changed();
    for (int i = 0; i < steps; ++i) {
      const float before = fsdp.full_parameter(model.scale)[0];
      const float x = 0.3f + 0.1f * static_cast<float>(i);
      fsdp.begin_step();
      tape.backward(model.loss(tape, Tensor::from<float>(memory, {1}, std::vector<float>{x}, "x")));
      fsdp.finish_step();
      optimizer->step(lr, ClipFactor{clip});
      result.gradient.push_back(2.0 * x * before);
      result.parameter.push_back(fsdp.full_parameter(model.scale)[0]);
    }
  });
  return result;
}

TEST(Sgd, FollowsItsFormula) {
  const auto t =
      trace([](Fsdp& f) { return std::make_unique<Sgd>(f, SgdOptions{.momentum = 0.9}); }, 10, 0.01,
            0.5, {1});
  double p = 1.5, v = 0;
  for (std::size_t i = 0; i < t.parameter.size(); ++i) {
    v = 0.9 * v + 0.5 * t.gradient[i];
    p -= 0.01 * v;
    EXPECT_NEAR(t.parameter[i], p, 1e-6);
  }
}

TEST(AdamW, FollowsItsFormulaAndDecaysOnlyMatrices) {
  for (const bool is_matrix : {true, false}) {
    for (const double eps : {1e-6, 0.7}) {  // of no account, and as large as the gradients
      for (const double clip : {1.0, 0.25}) {
        const auto t = trace(
            [=](Fsdp& f) {
              return std::make_unique<AdamW>(
                  f, AdamWOptions{.beta1 = 0.8, .beta2 = 0.9, .eps = eps, .weight_decay = 0.3});
            },
            10, 0.05, clip, is_matrix ? engine::Shape{1, 1} : engine::Shape{1});
        double p = 1.5, m = 0, v = 0;
        for (std::size_t i = 0; i < t.parameter.size(); ++i) {
          const double g = clip * t.gradient[i], n = static_cast<double>(i + 1);
          m = 0.8 * m + 0.2 * g;
          v = 0.9 * v + 0.1 * g * g;
          if (is_matrix) p -= 0.05 * 0.3 * p;
          p -= 0.05 * (m / (1 - std::pow(0.8, n))) / (std::sqrt(v / (1 - std::pow(0.9, n))) + eps);
          EXPECT_NEAR(t.parameter[i], p, 2e-6) << "eps " << eps << " clip " << clip;
        }
      }
    }
  }
}

TEST(ClipScale, IsTorchs) {
  EXPECT_EQ(clip_scale(0.5f, 1), 1);
  EXPECT_EQ(clip_scale(100, 0), 1);
  EXPECT_DOUBLE_EQ(clip_scale(4, 1), 1 / (4 + 1e-6));
}

TEST(Options, OutOfRangeIsRefused) {
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    testing::ToyModel model(1, 1);
    Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), model.blocks(), &model.root,
              {});
    EXPECT_THROW(Sgd(fsdp, {.momentum = 1}), engine::InvalidArgument);
    EXPECT_THROW(AdamW(fsdp, {.beta1 = -0.1}), engine::InvalidArgument);
    EXPECT_THROW(AdamW(fsdp, {.eps = 0}), engine::InvalidArgument);
  });
}

}  // namespace
}  // namespace tessera::shard

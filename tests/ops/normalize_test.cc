// Layer and RMS normalisation: values and gradients against a naive reference in double, sharing,
// frozen parameters, bf16, hard inputs.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/layernorm.h"
#include "ops/rmsnorm.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using testing::check_bf16;
using testing::check_gradients;
using testing::expect_close;
using testing::OpCase;
using testing::OpRun;
using testing::run_op;
using testing::Values;

constexpr float kEps = 1e-5f;

OpCase norm_case(Norm norm, Shape x, bool with_bias) {
  OpCase op{.inputs = {x},
            .parameters = {{x.dim(-1)}},
            .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
              return norm == Norm::kRms
                         ? rmsnorm(tape, leaves[0], p[0], kEps)
                         : layernorm(tape, leaves[0], p[0], with_bias ? &p[1] : nullptr, kEps);
            }};
  if (with_bias) op.parameters.push_back({x.dim(-1)});
  return op;
}

struct Reference {
  Values y, dx, dw, db;
  Reference(Norm norm, const OpRun& run) {
    const Values &x = run.leaves[0], &w = run.leaves[1], &dy = run.dy;
    const std::size_t cols = w.size();
    const auto size = static_cast<double>(cols);
    dw.assign(cols, 0), db.assign(cols, 0);
    for (std::size_t begin = 0; begin < x.size(); begin += cols) {
      double mean = 0, var = 0, g_mean = 0, gx_mean = 0;
      for (std::size_t j = 0; norm == Norm::kLayer && j < cols; ++j) mean += x[begin + j] / size;
      for (std::size_t j = 0; j < cols; ++j) var += std::pow(x[begin + j] - mean, 2) / size;
      const double rstd = 1 / std::sqrt(var + kEps);
      const auto xhat = [&](std::size_t j) { return (x[begin + j] - mean) * rstd; };
      for (std::size_t j = 0; j < cols; ++j) {
        y.push_back(xhat(j) * w[j] + (run.leaves.size() > 2 ? run.leaves[2][j] : 0));
        g_mean += norm == Norm::kLayer ? dy[begin + j] * w[j] / size : 0;
        gx_mean += dy[begin + j] * w[j] * xhat(j) / size;
        dw[j] += dy[begin + j] * xhat(j);
        db[j] += dy[begin + j];
      }
      for (std::size_t j = 0; j < cols; ++j)
        dx.push_back(rstd * (dy[begin + j] * w[j] - g_mean - xhat(j) * gx_mean));
    }
  }
};

TEST(Normalize, EqualsTheNaiveReference) {
  for (const Norm norm : {Norm::kLayer, Norm::kRms})
    for (const bool with_bias : {false, true})
      for (const Shape& x :
           {Shape{3}, Shape{2, 3, 13}, Shape{1, 33}, Shape{5, 1025}, Shape{1025, 31}}) {
        if (norm == Norm::kRms && with_bias) continue;
        SCOPED_TRACE(x.str());
        const OpRun run = run_op(norm_case(norm, x, with_bias));
        const Reference want(norm, run);
        expect_close(run.y, want.y, 2e-6, "y");
        expect_close(run.grads[0], want.dx, 5e-6, "dx");
        expect_close(run.grads[1], want.dw, 5e-6, "dw");
        if (with_bias) expect_close(run.grads[2], want.db, 5e-6, "db");
      }
}

TEST(Normalize, GradientsWhenSharedFrozenOrOfData) {
  check_gradients(norm_case(Norm::kLayer, {2, 3, 13}, true));
  check_gradients(norm_case(Norm::kLayer, {3, 33}, false));
  check_gradients(norm_case(Norm::kRms, {2, 3, 13}, false));
}

TEST(Normalize, Bf16IsOneRoundingFromF32) {
  check_bf16(norm_case(Norm::kLayer, {2, 3, 13}, true));
  check_bf16(norm_case(Norm::kLayer, {3, 1025}, true));
  check_bf16(norm_case(Norm::kRms, {33, 31}, false));
}

TEST(Normalize, AConstantRowGivesTheBiasAndALargeMeanDoesNotDrownTheVariance) {
  OpCase op = norm_case(Norm::kLayer, {2, 64}, true);
  op.transform = [](float) { return 3.0f; };
  for (const double y : run_op(op).y) EXPECT_EQ(y, 3);
  // Variance 1 around 1000: the mean of squares minus the squared mean would lose it.
  op.transform = [](float v) { return 1000 + v; };
  const OpRun run = run_op(op);
  const Reference want(Norm::kLayer, run);
  for (std::size_t i = 0; i < run.y.size(); ++i) EXPECT_NEAR(run.y[i], want.y[i], 0.5);
}

TEST(Normalize, OneColumnIsAConstant) {
  const OpRun run = run_op(norm_case(Norm::kLayer, {5, 1}, true));
  for (const double y : run.y) EXPECT_EQ(y, run.leaves[2][0]);
  EXPECT_EQ(run.grads[0], Values(5, 0));
}

TEST(Normalize, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Parameter w{.name = "w", .shape = {5}}, wide{.name = "wide", .shape = {7}};
  Parameter half{.name = "half", .shape = {5}};
  engine::materialize({&w, &wide}, memory, 1);
  engine::materialize({&half}, memory, 1, DType::kBF16);
  const Tensor x = Tensor::zeros(memory, {2, 5}, DType::kF32);
  EXPECT_NO_THROW(layernorm(tape, x, w, &w));
  EXPECT_THROW(layernorm(tape, x, wide, &w), InvalidArgument);
  EXPECT_THROW(layernorm(tape, x, w, &wide), InvalidArgument);
  EXPECT_THROW(layernorm(tape, x, w, &half), InvalidArgument);
  EXPECT_THROW(rmsnorm(tape, x, half), InvalidArgument);
  EXPECT_THROW(rmsnorm(tape, Tensor::zeros(memory, {}, DType::kF32), w), InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops

// Layer and RMS normalisation: values and gradients against a naive reference in double, sharing,
// frozen parameters, bf16, hard inputs.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/add.h"
#include "ops/layernorm.h"
#include "ops/rmsnorm.h"
#include "ops/swiglu.h"
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

enum class Fused { kNo, kYes };

// sum = x + h and y = norm(sum), one op or two; the output mixes them so that their gradients
// differ.
OpCase add_norm_case(Norm norm, Fused fused, Shape x) {
  return {.inputs = {x, x},
          .parameters = {{x.dim(-1)}, {x.dim(-1)}},
          .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
            Parameter* bias = norm == Norm::kLayer ? &p[1] : nullptr;
            NormOfSum out;
            if (fused == Fused::kYes) {
              out = norm == Norm::kLayer ? add_layernorm(tape, leaves[0], leaves[1], p[0], bias)
                                         : add_rmsnorm(tape, leaves[0], leaves[1], p[0]);
            } else {
              out.sum = add(tape, leaves[0], leaves[1]);
              out.y = normalize(tape, norm, out.sum, &p[0], bias, kEps);
            }
            const Tensor y = swiglu(tape, out.y, out.sum);
            return norm == Norm::kLayer ? y : normalize(tape, Norm::kLayer, y, &p[0], &p[1], kEps);
          }};
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

TEST(Normalize, WithoutParametersIsThatWithOnes) {
  for (const Norm norm : {Norm::kLayer, Norm::kRms}) {
    const auto normed = [norm](Tape& tape, const Tensor& x) {
      return norm == Norm::kLayer ? layernorm(tape, x, kEps) : rmsnorm(tape, x, kEps);
    };
    const OpCase without{.inputs = {{3, 13}}, .build = [=](Tape& tape, const auto& x, auto&) {
                           return normed(tape, x[0]);
                         }};
    OpCase with = norm_case(norm, {3, 13}, false);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const testing::RunOptions options{.dtype = dtype, .grad_dtype = dtype};
      const OpRun run = run_op(without, options);
      with.build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
        engine::copy_from_floats(p[0].value, std::vector<float>(13, 1));
        return norm == Norm::kLayer ? layernorm(tape, x[0], p[0], nullptr, kEps)
                                    : rmsnorm(tape, x[0], p[0], kEps);
      };
      const OpRun of_ones = run_op(with, options);
      EXPECT_EQ(run.leaves[0], of_ones.leaves[0]);
      EXPECT_EQ(run.y, of_ones.y);
      EXPECT_EQ(run.grads[0], of_ones.grads[0]);
    }
    check_gradients(without);
    const Memory memory;
    Tape tape(memory, engine::Stream::inline_cpu("compute"));
    EXPECT_THROW(normed(tape, Tensor::zeros(memory, {}, DType::kF32)), InvalidArgument);
    EXPECT_THROW(normed(tape, Tensor::zeros(memory, {3}, DType::kI32)), InvalidArgument);
  }
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

TEST(AddNormalize, HasTheBitsOfTheAdditionAndTheNorm) {
  for (const Norm norm : {Norm::kLayer, Norm::kRms})
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const int num_uses : {1, 2}) {
        const testing::RunOptions options{
            .dtype = dtype, .grad_dtype = dtype, .num_uses = num_uses};
        const OpRun one = run_op(add_norm_case(norm, Fused::kYes, {5, 205}), options);
        const OpRun two = run_op(add_norm_case(norm, Fused::kNo, {5, 205}), options);
        EXPECT_EQ(one.y, two.y);
        if (num_uses == 1) {
          EXPECT_EQ(one.grads, two.grads);
        }
        // The second use adds what the two-op form adds one by one.
        for (std::size_t leaf = 0; leaf < one.grads.size(); ++leaf)
          expect_close(one.grads[leaf], two.grads[leaf], dtype == DType::kF32 ? 1e-6 : 0x1p-7,
                       "leaf " + std::to_string(leaf));
      }
}

TEST(AddNormalize, GradientsWhenSharedFrozenOrOfData) {
  check_gradients(add_norm_case(Norm::kLayer, Fused::kYes, {2, 3, 13}));
  check_gradients(add_norm_case(Norm::kRms, Fused::kYes, {3, 33}));
  check_bf16(add_norm_case(Norm::kLayer, Fused::kYes, {5, 205}), 0x1p-6);
}

TEST(AddNormalize, EitherOutputMayGoUnused) {
  for (const bool keep_sum : {true, false}) {
    const auto one_output = [keep_sum](Fused fused) {
      return OpCase{
          .inputs = {{2, 13}, {2, 13}},
          .parameters = {{13}},
          .build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
            if (fused == Fused::kNo) {
              const Tensor sum = add(tape, x[0], x[1]);
              return keep_sum ? sum : rmsnorm(tape, sum, p[0]);
            }
            const NormOfSum out = add_rmsnorm(tape, x[0], x[1], p[0]);
            return keep_sum ? out.sum : out.y;
          }};
    };
    const OpRun one = run_op(one_output(Fused::kYes)), two = run_op(one_output(Fused::kNo));
    EXPECT_EQ(one.y, two.y);
    for (const std::size_t leaf : {0, 1}) EXPECT_EQ(one.grads[leaf], two.grads[leaf]);
    if (keep_sum) continue;  // w has no gradient
    EXPECT_EQ(one.grads[2], two.grads[2]);
  }
}

TEST(AddNormalize, BothSidesMayBeTheSame) {
  check_gradients(
      {.inputs = {{3, 13}},
       .parameters = {{13}},
       .build = [](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
         const NormOfSum out = add_rmsnorm(tape, x[0], x[0], p[0]);
         return swiglu(tape, out.y, out.sum);
       }});
}

TEST(Normalize, AWeightMayHaveMoreUsesThanItsBias) {
  for (const bool bias_first : {false, true}) {
    const OpCase op{
        .inputs = {{3, 13}},
        .parameters = {{13}, {13}},
        .build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
          if (bias_first) return rmsnorm(tape, layernorm(tape, x[0], p[0], &p[1]), p[0]);
          return layernorm(tape, rmsnorm(tape, x[0], p[0]), p[0], &p[1]);
        }};
    check_gradients(op);
    check_bf16(op, 0x1p-6);
  }
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
  EXPECT_THROW(add_rmsnorm(tape, x, x.reshape({5, 2}), w), InvalidArgument);
  EXPECT_THROW(add_layernorm(tape, x, Tensor::zeros(memory, {2, 5}, DType::kBF16), w, &w),
               InvalidArgument);
}

}  // namespace
}  // namespace tessera::ops

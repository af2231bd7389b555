// Layer and RMS normalisation on a GPU, alone and with the residual addition: values and gradients
// of the CPU for rows of any width, and bits that do not depend on addresses.
#include <cmath>

#include "ops/add.h"
#include "ops/group_norm.h"
#include "ops/layernorm.h"
#include "ops/rmsnorm.h"
#include "ops/swiglu.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

enum class Residual { kNo, kYes };

// The output of the fused op mixes the sum and its norm, so that their gradients differ.
OpCase norm_case(Norm norm, Shape x, Residual residual = Residual::kNo) {
  OpCase op{.inputs = {x},
            .parameters = {{x.dim(-1)}},
            .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
              Parameter* bias = norm == Norm::kLayer ? &p[1] : nullptr;
              if (residual == Residual::kNo)
                return normalize(tape, norm, leaves[0], &p[0], bias, 1e-5f);
              const NormOfSum out = norm == Norm::kLayer
                                        ? add_layernorm(tape, leaves[0], leaves[1], p[0], bias)
                                        : add_rmsnorm(tape, leaves[0], leaves[1], p[0]);
              return swiglu(tape, out.y, out.sum);
            }};
  if (residual == Residual::kYes) op.inputs.push_back(x);
  if (norm == Norm::kLayer) op.parameters.push_back({x.dim(-1)});
  return op;
}

TEST(CudaNormalize, IsThatOfTheCpuForAnyWidth) {
  for (const Norm norm : {Norm::kLayer, Norm::kRms})
    for (const Shape& x : {Shape{3}, Shape{33, 1}, Shape{2, 3, 13}, Shape{1, 31}, Shape{37, 32},
                           Shape{5, 257}, Shape{3, 1025}, Shape{3, 768}}) {
      SCOPED_TRACE(x.str());
      check_cuda(norm_case(norm, x), {.f32 = 5e-6, .bf16 = 5e-6});
    }
}

TEST(CudaNormalize, IsThatOfTheCpuWithoutParametersAndInGroups) {
  check_cuda({.inputs = {{3, 33}},
              .build = [](Tape& tape, const auto& x,
                          auto&) { return layernorm(tape, rmsnorm(tape, x[0])); }},
             {.f32 = 5e-6, .bf16 = 0x1p-6});
  check_cuda({.inputs = {{2, 6, 5}},
              .parameters = {{6}, {6}},
              .build = [](Tape& tape, const auto& x,
                          auto& p) { return group_norm(tape, x[0], 3, p[0], &p[1]); }},
             {.f32 = 5e-6, .bf16 = 0x1p-6});
}

TEST(CudaNormalize, RowsWiderThanABlockAndMoreRowsThanBlocks) {
  check_cuda_run(norm_case(Norm::kLayer, {3, 5000}), {.num_uses = 2}, {.f32 = 5e-6});
  check_cuda_run(norm_case(Norm::kRms, {2, 1500}), {.num_uses = 2}, {.f32 = 5e-6});
  check_cuda_run(norm_case(Norm::kLayer, {2, 8200}), {.dtype = DType::kBF16}, {.bf16 = 5e-6});
  // Columns that no thread keeps, in a block's second row.
  check_cuda_run(norm_case(Norm::kLayer, {264 + 3, 2052}), {}, {.f32 = 1e-5});
  // 9 rows at once in each of 264 blocks.
  check_cuda_run(norm_case(Norm::kLayer, {2 * 264 * 9 + 5, 5}), {}, {.f32 = 1e-5});
  // A row to a warp, 8 in each of 132 blocks; and to some warps.
  check_cuda_run(norm_case(Norm::kLayer, {2 * 132 * 8 + 5, 24}, Residual::kYes),
                 {.dtype = DType::kBF16, .num_uses = 2}, {.bf16 = 0x1p-6});
  check_cuda_run(norm_case(Norm::kLayer, {2 * 264 + 5, 1032}, Residual::kYes),
                 {.dtype = DType::kBF16}, {.bf16 = 0x1p-7});
}

TEST(CudaNormalize, TheResidualFormIsThatOfTheCpu) {
  // What is mixed after it rounds once more, so a unit in the last place may become two.
  const CudaBounds bounds{.f32 = 5e-6, .bf16 = 0x1p-7};
  for (const Norm norm : {Norm::kLayer, Norm::kRms})
    for (const Shape& x :
         {Shape{2, 3, 13}, Shape{1, 31}, Shape{7, 33}, Shape{3, 1025}, Shape{9, 64}}) {
      SCOPED_TRACE(x.str());
      check_cuda(norm_case(norm, x, Residual::kYes), bounds);
    }
  check_cuda_run(norm_case(Norm::kLayer, {2, 5000}, Residual::kYes), {}, bounds);
}

// What is normalised is the sum as it is stored. Rows of a warp, and of a block.
TEST(CudaNormalize, TheResidualFormHasTheBitsOfAdditionAndNorm) {
  for (const std::int64_t cols : {96, 97, 2056}) {
    const auto op = [&](bool fused) {
      return OpCase{
          .inputs = {{5, cols}, {5, cols}},
          .parameters = {{cols}, {cols}},
          .build = [=](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
            if (fused) return add_layernorm(tape, x[0], x[1], p[0], &p[1]).y;
            return layernorm(tape, add(tape, x[0], x[1]), p[0], &p[1]);
          }};
    };
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const RunOptions options{.dtype = dtype, .on_cuda = true};
      EXPECT_EQ(run_op(op(true), options).y, run_op(op(false), options).y) << cols;
    }
  }
}

TEST(CudaNormalize, BitsDoNotDependOnAddresses) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const OpCase op = norm_case(Norm::kLayer, {5, 96}, Residual::kYes);
    const OpRun aligned = run_op(op, {.dtype = dtype, .on_cuda = true});
    const OpRun shifted = run_op(op, {.dtype = dtype, .offset = 1, .on_cuda = true});
    EXPECT_EQ(aligned.y, shifted.y);
    EXPECT_EQ(aligned.grads, shifted.grads);
  }
}

TEST(CudaNormalize, AConstantRowGivesTheBiasAndALargeMeanDoesNotDrownTheVariance) {
  OpCase op = norm_case(Norm::kLayer, {2, 64});
  op.transform = [](float) { return 3.0f; };
  for (const double y : run_op(op, {.on_cuda = true}).y) EXPECT_EQ(y, 3);
  op.transform = [](float v) { return 1000 + v; };
  check_cuda_run(op, {}, {.f32 = 1e-3});
}

TEST(CudaNormalize, NoRowsGiveZeroGradients) {
  const OpRun run = run_op(norm_case(Norm::kLayer, {0, 33}), {.on_cuda = true});
  EXPECT_EQ(run.grads[1], Values(33, 0));
  EXPECT_EQ(run.grads[2], Values(33, 0));
}

}  // namespace
}  // namespace tessera::ops

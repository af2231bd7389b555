// The linear layer on a GPU against the CPU.
#include "ops/linear.h"

#include <algorithm>
#include <memory>

#include "engine/gemm/gemm_algorithms.h"
#include "ops/gelu.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

OpCase linear_case(Shape x, std::int64_t out, WeightLayout layout, bool with_bias) {
  const std::int64_t in = x.dim(-1);
  const Shape w = layout == WeightLayout::kInOut ? Shape{in, out} : Shape{out, in};
  OpCase op{.inputs = {x},
            .parameters = {w},
            .build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
              return linear(tape, leaves[0], p[0], with_bias ? &p[1] : nullptr, layout);
            }};
  if (with_bias) op.parameters.push_back({out});
  return op;
}

// Both sum in f32, in different orders; the largest element is at least the root of the number of
// terms, and the error of a sum grows no faster. In bf16 a GPU may round a product before a bias,
// or another gradient, is added.
constexpr CudaBounds kBounds{.f32 = 2e-6, .bf16 = 0x1p-8};

TEST(CudaLinearTest, IsThatOfTheCpu) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    for (const bool with_bias : {false, true}) {
      check_cuda(linear_case({2, 3, 32}, 48, layout, with_bias), kBounds);
      check_cuda(linear_case({31, 33}, 13, layout, with_bias), kBounds);
      check_cuda(linear_case({1, 65}, 1, layout, with_bias), kBounds);
    }
  }
}

// More rows than one block of the column sums takes, and more than its parts.
TEST(CudaLinearTest, ManyRows) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn})
    check_cuda_run(linear_case({1025, 7}, 264, layout, true), {}, kBounds);
  check_cuda_run(linear_case({1025, 8}, 40, WeightLayout::kInOut, true),
                 {.dtype = DType::kBF16, .grad_dtype = DType::kBF16, .num_uses = 2, .offset = 1},
                 kBounds);
  check_cuda_run(linear_case({33000, 1}, 3, WeightLayout::kInOut, true), {}, {.f32 = 2e-5});
}

OpCase with_gelu(Shape x, std::int64_t out, WeightLayout layout, bool apart = false) {
  OpCase op = linear_case(x, out, layout, true);
  op.build = [=](Tape& tape, const std::vector<Tensor>& leaves, std::vector<Parameter>& p) {
    return apart ? gelu(tape, linear(tape, leaves[0], p[0], &p[1], layout))
                 : linear_gelu(tape, leaves[0], p[0], p[1], layout);
  };
  return op;
}

// GELU of what rounds to another bf16, within the statement of linear_gelu().
constexpr CudaBounds kGeluBounds{.f32 = 6e-6, .bf16 = 0x1p-7};

TEST(CudaLinearTest, GeluHasTheBitsOfGeluApartUnlessTimeChooses) {
  for (const auto layout : {WeightLayout::kInOut, WeightLayout::kOutIn}) {
    for (const Shape& x : {Shape{2, 3, 32}, Shape{31, 33}, Shape{1, 8}}) {
      for (const std::int64_t out : {48, 13}) {
        check_cuda(with_gelu(x, out, layout), kGeluBounds);
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          const RunOptions options{.dtype = dtype, .num_uses = 2, .on_cuda = true};
          const OpRun one = run_op(with_gelu(x, out, layout), options),
                      apart = run_op(with_gelu(x, out, layout, true), options);
          EXPECT_EQ(one.y, apart.y);
          EXPECT_EQ(one.grads, apart.grads);
        }
      }
    }
  }
}

TEST(CudaLinearTest, GeluIsChosenByTimeAndKept) {
  if constexpr (engine::kCudaBuilt) {
    const OpCase plain = with_gelu({64, 32}, 48, WeightLayout::kInOut);
    const auto gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
    const auto chosen = std::make_shared<engine::GemmAlgorithms>();
    OpCase op = plain;
    op.build = [&](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
      if (tape.stream().device().is_cuda()) {
        engine::set_gemm_algorithms(tape.stream(), chosen);
        engine::record_gemms(tape.stream(), gemms);
      }
      return plain.build(tape, x, p);
    };
    for (const DType dtype : {DType::kF32, DType::kBF16})
      run_op(op, {.dtype = dtype, .on_cuda = true});
    const auto has_gelu = [](const auto& gemm) { return gemm.before_gelu.data != nullptr; };
    EXPECT_EQ(std::ranges::count_if(*gemms, has_gelu), 1) << "of bf16 alone";
    const engine::Stream idle = engine::Stream::cuda("tuning", 0);
    std::size_t num_gelu = 0;
    for (const engine::TunedGemm& t : engine::tune_gemms(idle, *gemms, *chosen)) {
      if (!has_gelu(t.gemm)) continue;
      ++num_gelu;
      EXPECT_LE(t.ms, t.first_ms);
      EXPECT_EQ(t.algorithm == "GELU apart", t.ms == t.first_ms) << t.algorithm;
    }
    EXPECT_EQ(num_gelu, 1u);
    EXPECT_TRUE(engine::tune_gemms(idle, *gemms, *chosen).empty());
    EXPECT_TRUE(chosen->text().find(" | bias | gelu\t") != std::string::npos) << chosen->text();
    check_cuda_run(op, {.dtype = DType::kBF16}, kGeluBounds);
  } else {
    FAIL() << "built without CUDA";
  }
}

}  // namespace
}  // namespace tessera::ops

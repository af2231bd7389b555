// The slope of GELU as part of a product, where a choice of algorithms says so.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/gemm/gemm_algorithms.h"
#include "engine/gemm/gemm_cuda.h"
#include "ops/linear.h"
#include "tests/cuda_emulation/forced_slope.h"
#include "tests/testing/cuda_op.h"

namespace tessera::cuda_emulation {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::GemmAlgorithms;
using engine::InvalidArgument;
using engine::Stream;

constexpr std::int64_t kRows = 8, kCols = 24, kDepth = 16;

Tensor filled(const Memory& memory, const Shape& shape, double value, DType dtype) {
  return to_tensor(
      memory, shape,
      std::vector<float>(static_cast<std::size_t>(shape.numel()), static_cast<float>(value)),
      dtype);
}

// Operands of which each element of the product is exactly 1/2.
struct Operands {
  explicit Operands(const Memory& memory, double at = 1)
      : a(filled(memory, {kRows, kDepth}, 0.25, DType::kBF16)),
        b(filled(memory, {kDepth, kCols}, 0.125, DType::kBF16)),
        c(filled(memory, {kRows, kCols}, NAN, DType::kBF16)),
        at(filled(memory, {kRows, kCols}, at, DType::kBF16)),
        sums(filled(memory, {2, kCols}, NAN, DType::kF32)) {}

  engine::DeviceProduct product(decltype(engine::GeluSlope::finish) finish) const {
    return {.a = device_matrix(a, kRows, kDepth),
            .b = device_matrix(b, kDepth, kCols),
            .c = device_matrix(c, kRows, kCols),
            .slope = {.at = device_matrix(at, kRows, kCols),
                      .column_sums = device_matrix(sums, 2, kCols),
                      .finish = finish}};
  }
  Tensor a, b, c, at, sums;
};

void multiply(const Stream& stream, const Memory& memory, const engine::DeviceProduct& product) {
  stream.launch(
      {.name = "gemm"}, [] {}, [&](const auto& s) { engine::gemm_cuda(s, memory, product); });
}

// Leaves C as it is, and says in sums[0][0] what it was told.
void say_whether_sloped(const Stream& stream, const engine::DeviceMatrix& c,
                        const engine::GeluSlope& slope, bool is_sloped) {
  EXPECT_EQ(c.cols, kCols);
  const int value = is_sloped ? 0x3f : 0;
  EXPECT_EQ(
      cudaMemsetAsync(slope.column_sums.data, value, 4, static_cast<cudaStream_t>(stream.native())),
      cudaSuccess);
}

TEST(GeluSlopeTest, IsTheProductsWhereTheFileHasAnAlgorithm) {
  const std::string of_product = fmt::format(
      "cublasLt {} | Emulated sm_90 | (8, 16) (16, 24) | bf16 ld 16 align 16 | bf16 ld 24 align 16 "
      "| bf16 ld 24 align 16 | gelu slope | sums",
      cublasLtGetVersion());
  const auto run = [&](int id) {
    const Stream stream = Stream::cuda("compute", 0);
    const Memory memory(stream);
    const auto algorithms = std::make_shared<GemmAlgorithms>();
    if (id >= 0) algorithms->insert(of_product, algorithm_of(static_cast<std::uint32_t>(id)));
    engine::set_gemm_algorithms(stream, algorithms);
    const Operands operands(memory);
    multiply(stream, memory, operands.product(say_whether_sloped));
    EXPECT_EQ(to_values(operands.at), std::vector<double>(kRows * kCols, 1)) << "it is read";
    return std::pair(to_values(operands.c), to_values(operands.sums)[0] != 0);
  };
  // gelu'(1) = 1.0829641, a half of which rounds to this.
  const Values half(kRows * kCols, 0.5), sloped(kRows * kCols, 0.54296875);
  EXPECT_EQ(run(-1), std::pair(half, false)) << "nothing was timed";
  EXPECT_EQ(run(0), std::pair(half, false)) << "faster apart";
  for (const int id : {1, 2, 3}) EXPECT_EQ(run(id), std::pair(sloped, true)) << id;
  EXPECT_THROW(run(9), engine::IoError);
}

TEST(GeluSlopeTest, RefusesWhatDoesNotFit) {
  const Stream stream = Stream::cuda("compute", 0);
  const Memory memory(stream);
  const Operands operands(memory);
  const engine::DeviceProduct fits = operands.product(say_whether_sloped);
  const auto refuse = [&](auto change) {
    engine::DeviceProduct product = fits;
    change(product);
    EXPECT_THROW(multiply(stream, memory, product), InvalidArgument);
  };
  refuse([](auto& p) { p.accumulate = true; });
  refuse([&](auto& p) { p.bias = operands.a.raw(); });
  refuse([](auto& p) { p.slope.finish = nullptr; });
  refuse([](auto& p) { p.slope.at = p.slope.at.t(); });
  refuse([](auto& p) { p.slope.at.rows = 4; });
  refuse([](auto& p) { p.slope.at.dtype = DType::kF32; });
  refuse([](auto& p) { p.slope.column_sums.cols = 16; });
  refuse([](auto& p) { p.slope.column_sums.dtype = DType::kBF16; });
  multiply(stream, memory, fits);
  stream.synchronize();
}

// The two layers around GELU, with every slope that cublasLt takes as part of its product.
struct Mlp {
  explicit Mlp(std::int64_t rows, std::int64_t hidden, std::uint32_t id) {
    op = {.inputs = {{rows, 32}},
          .parameters = {{32, hidden}, {hidden}, {hidden, 16}, {16}},
          .build = [this](Tape& tape, const std::vector<Tensor>& x, std::vector<Parameter>& p) {
            if (tape.stream().device().is_cuda()) {
              engine::set_gemm_algorithms(tape.stream(), algorithms);
              engine::record_gemms(tape.stream(), gemms);
            }
            return ops::gelu_mlp(tape, x[0], p[0], p[1], p[2], &p[3]);
          }};
    plain = run();
    run(2);  // the inner layer's bias is frozen: no sums
    algorithms = forced_slopes(*gemms, id);
  }
  OpRun run(int without_grad = -1) const {
    return run_op(op, {.dtype = DType::kBF16,
                       .round_to_bf16 = true,
                       .on_cuda = true,
                       .without_grad = without_grad});
  }

  OpCase op;
  std::shared_ptr<std::vector<engine::DeviceProduct>> gemms =
      std::make_shared<std::vector<engine::DeviceProduct>>();
  std::shared_ptr<GemmAlgorithms> algorithms = std::make_shared<GemmAlgorithms>();
  OpRun plain;  // apart
};

// dh is not seen, but what is made of it: each a sum over elements that differ by 2^-7 at most.
TEST(GeluSlopeTest, GradientsAreWithinTheBound) {
  for (const std::uint32_t id : {1, 2, 3}) {
    for (const std::int64_t rows : {64, 300}) {
      const Mlp mlp(rows, 48, id);
      EXPECT_EQ(mlp.algorithms->size(), 2) << "with sums and without";
      check_cuda_run(mlp.op, {.dtype = DType::kBF16}, {.bf16 = 0x1p-6});
      const OpRun fused = mlp.run();
      EXPECT_EQ(fused.y, mlp.plain.y);
      for (const std::size_t leaf : {3, 4})
        EXPECT_EQ(fused.grads[leaf], mlp.plain.grads[leaf]) << "of the outer layer";
      for (const std::size_t leaf : {0, 1, 2}) {
        EXPECT_NE(fused.grads[leaf], mlp.plain.grads[leaf]) << "nothing was fused";
        expect_as_on_cpu(fused.grads[leaf], mlp.plain.grads[leaf], 0x1p-7, DType::kBF16,
                         fmt::format("leaf {}", leaf));
      }
    }
  }
}

TEST(GeluSlopeTest, FrozenWeightsLeaveTheOthersTheirBits) {
  const Mlp mlp(64, 48, 1);
  const OpRun all = mlp.run();
  for (int without = 0; without < 5; ++without) {
    const OpRun fewer = mlp.run(without);
    for (int leaf = 0; leaf < 5; ++leaf) {
      const auto at = static_cast<std::size_t>(leaf);
      EXPECT_EQ(fewer.grads[at], leaf == without ? Values{} : all.grads[at])
          << "leaf " << leaf << " without gradient of leaf " << without;
    }
  }
}

// A width that is no multiple of 8 cannot be the leading dimension of what GELU was taken of.
TEST(GeluSlopeTest, OddWidthsAreApart) {
  const Mlp mlp(64, 44, 1);
  EXPECT_EQ(mlp.algorithms->size(), 0);
  EXPECT_EQ(mlp.run().grads, mlp.plain.grads);
}

}  // namespace
}  // namespace tessera::cuda_emulation

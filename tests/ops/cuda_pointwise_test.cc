// Pointwise ops on a GPU: values and gradients of the CPU, any size and alignment.
#include <cmath>

#include "ops/add.h"
#include "ops/dropout.h"
#include "ops/gelu.h"
#include "ops/mul.h"
#include "ops/relu.h"
#include "ops/scale.h"
#include "ops/sum.h"
#include "ops/swiglu.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::RandomStream;

const std::int64_t kSizes[] = {1, 3, 8, 31, 33, 257, 1025};
const CudaBounds kSameBits{.f32 = 0, .bf16 = 0};

OpCase unary_case(const std::function<Tensor(Tape&, const Tensor&)>& op, std::int64_t numel) {
  return {.inputs = {{numel}},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0]); },
          .scale = 2};
}

OpCase binary_case(Tensor (*op)(Tape&, const Tensor&, const Tensor&), std::int64_t numel) {
  return {.inputs = {{numel}, {numel}},
          .build = [op](Tape& tape, const auto& x, auto&) { return op(tape, x[0], x[1]); }};
}

OpCase dropout_case(std::int64_t numel, float p, std::uint64_t first_index) {
  return unary_case(
      [=](Tape& tape, const Tensor& x) {
        return dropout(tape, x, p, RandomStream{0x123456789ABCDEFull, 42}, first_index);
      },
      numel);
}

TEST(CudaPointwise, GeluIsThatOfTheCpu) {
  for (const GeluKind kind : {GeluKind::kTanh, GeluKind::kErf})
    for (const std::int64_t numel : kSizes)
      check_cuda(unary_case([kind](Tape& t, const Tensor& x) { return gelu(t, x, kind); }, numel));
}

TEST(CudaPointwise, GeluFarOutIsZeroOrIdentity) {
  for (const GeluKind kind : {GeluKind::kTanh, GeluKind::kErf}) {
    OpCase op = unary_case([kind](Tape& t, const Tensor& x) { return gelu(t, x, kind); }, 257);
    op.transform = [](float v) { return v < 0 ? -50 + v : 50 + v; };
    const OpRun run = run_op(op, {.on_cuda = true});
    for (std::size_t i = 0; i < run.y.size(); ++i) {
      const double x = run.leaves[0][i];
      EXPECT_NEAR(run.y[i], x < 0 ? 0 : x, 1e-30);
      EXPECT_NEAR(run.grads[0][i], x < 0 ? 0 : run.dy[i], 1e-30);
    }
    op.transform = [](float) { return NAN; };
    for (const double y : run_op(op, {.on_cuda = true}).y) EXPECT_TRUE(std::isnan(y));
  }
}

TEST(CudaPointwise, ReluHasTheBitsOfTheCpu) {
  for (const std::int64_t numel : kSizes) check_cuda(unary_case(relu, numel), kSameBits);
  OpCase op = unary_case(relu, 33);
  op.transform = [](float) { return NAN; };
  for (const double y : run_op(op, {.on_cuda = true}).y) EXPECT_TRUE(std::isnan(y));
}

TEST(CudaPointwise, SwigluIsThatOfTheCpu) {
  for (const std::int64_t numel : kSizes) check_cuda(binary_case(swiglu, numel));
  check_cuda(unary_case([](Tape& t, const Tensor& x) { return swiglu(t, x, x); }, 33));
}

TEST(CudaPointwise, AddHasTheBitsOfTheCpu) {
  for (const std::int64_t numel : kSizes) check_cuda(binary_case(add, numel), kSameBits);
  check_cuda(unary_case([](Tape& t, const Tensor& x) { return add(t, x, x); }, 33), kSameBits);
}

TEST(CudaPointwise, MulAndScaleHaveTheBitsOfTheCpu) {
  const auto third = [](Tape& t, const Tensor& x) { return scale(t, x, 1.0f / 3); };
  for (const std::int64_t numel : kSizes) {
    check_cuda(binary_case(mul, numel), kSameBits);
    check_cuda(unary_case(third, numel), kSameBits);
  }
  check_cuda(unary_case([](Tape& t, const Tensor& x) { return mul(t, x, x); }, 33), kSameBits);
}

TEST(CudaPointwise, SumHasTheBitsOfTheCpu) {
  for (const std::int64_t numel : {0, 1, 31, 1023, 1025, 65'536, 65'537, 140'001}) {
    check_cuda(unary_case(sum, numel), kSameBits);
  }
}

TEST(CudaPointwise, DropoutHasTheMaskOfTheCpuForAnyFirstIndex) {
  for (const std::uint64_t first : {0ull, 1ull, 3ull, 8ull, 0x3FFFFFF81ull, 0x1000000000001ull})
    for (const std::int64_t numel : {1, 3, 31, 257, 1028})
      check_cuda(dropout_case(numel, 0.3f, first));
  // One use: nothing is added, so the bits are those of one product.
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const std::uint64_t first : {0ull, 5ull})
      for (const float p : {1e-9f, 0.1f, 1 - 0x1p-24f})
        check_cuda_run(dropout_case(1025, p, first), {.dtype = dtype}, kSameBits);
}

// As a step that is captured draws.
TEST(CudaPointwise, DropoutCountsSamplesOnTheDevice) {
  const auto compute = engine::Stream::cuda("compute", 0);
  const engine::Memory memory(compute);
  Tape tape(memory, compute);
  const RandomStream random{7, 1};
  const Tensor x = Tensor::from<float>(memory, {257}, std::vector<float>(257, 1.0f), "x");
  for (const std::int64_t count : {0, 1, 1000}) {
    const Tensor on_gpu = Tensor::from<std::int64_t>(memory, {1}, std::vector{count}, "count");
    for (const std::int64_t numel : {4, 5}) {  // a sample begins a block of random words, or not
      for (const std::int64_t first : {0, 5}) {
        const auto index = [](std::int64_t i) { return static_cast<std::uint64_t>(i); };
        const Tensor want = tape.no_grad(
            [&] { return dropout(tape, x, 0.5f, random, index(first + count * numel)); });
        const Tensor got = tape.no_grad([&] {
          return dropout(tape, x, 0.5f, random, index(first), {on_gpu, numel});
        });
        EXPECT_EQ(engine::to_vector<float>(got), engine::to_vector<float>(want))
            << count << " samples of " << numel << ", " << first;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::ops

// What a kernel of the CPU needs besides its operands is asked for before the launch, so that a
// device that runs nothing counts it as well.
#include <gtest/gtest.h>

#include "engine/meta.h"
#include "engine/tape.h"
#include "ops/layernorm.h"
#include "ops/sum.h"

namespace tessera::ops {
namespace {

using engine::Category;
using engine::DeviceKind;
using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;

constexpr std::int64_t kWidth = 8;

// The most workspace of a layernorm's forward and backward.
std::int64_t peak_of_layernorm(const Stream& stream) {
  const Memory memory(stream);
  Tape tape(memory, stream);
  Parameter weight{"weight", {kWidth}}, bias{"bias", {kWidth}};
  for (Parameter* p : {&weight, &bias}) {
    p->value = Tensor::zeros(memory, p->shape, DType::kF32, p->name);
    p->grad = Tensor::zeros(memory, p->shape, DType::kF32, p->name);
  }
  const Tensor x = Tensor::zeros(memory, {4, kWidth}, DType::kF32, "x");
  tape.backward(sum(tape, layernorm(tape, x, weight, &bias)));
  return memory.stats().peak_nbytes[static_cast<std::size_t>(Category::kWorkspace)];
}

TEST(HostWorkspace, IsCountedWhereNothingRuns) {
  const std::int64_t nbytes = peak_of_layernorm(Stream::inline_cpu("compute"));
  EXPECT_EQ(nbytes, 2 * kWidth * 4);  // sums for both gradients
  EXPECT_EQ(peak_of_layernorm(Stream::meta("compute", DeviceKind::kCpu, {})), nbytes);
}

}  // namespace
}  // namespace tessera::ops

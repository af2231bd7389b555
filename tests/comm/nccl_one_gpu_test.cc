// A world of one rank over NCCL: all that one GPU can show of a real library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl.h"
#include "engine/copy.h"
#include "engine/memory.h"

namespace tessera::comm {
namespace {

using engine::BFloat16;
using engine::DType;
using engine::Memory;
using engine::to_vector;
using ::testing::HasSubstr;

constexpr std::int64_t kNumel = 1025;

Tensor numbers(const Memory& memory, DType dtype) {
  return engine::dispatch_float(dtype, "numbers", [&](auto t) {
    std::vector<decltype(t)> values(kNumel);
    for (std::size_t i = 0; i < values.size(); ++i) {
      engine::store_f32(values[i], static_cast<float>(i % 200));
    }
    return Tensor::from<decltype(t)>(memory, {kNumel}, values, "numbers");
  });
}

void exercise(ProcessGroup& group) {
  const Stream stream = Stream::cuda("comm", 0);
  const Memory memory(stream);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor in = numbers(memory, dtype);
    const Tensor out = Tensor::empty(memory, {kNumel}, dtype, "out");
    const Tensor sum = numbers(memory, DType::kF32);
    group.all_gather(in, out, stream, "gather");
    group.broadcast(out, 0, stream, "broadcast");
    group.reduce_scatter(out, sum, Accumulate::kYes, stream, "scatter");
    group.all_to_all(in, out, stream, "transpose");
    group.all_reduce(out, sum, Accumulate::kYes, stream, "reduce");
    group.agree(stream);
    stream.synchronize();
    group.check();
    group.barrier("step");
    const std::vector<float> sums = to_vector<float>(sum);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      ASSERT_EQ(sums[i], 3 * static_cast<float>(i % 200)) << i;
    }
    const std::vector<float> once = to_vector<float>(numbers(memory, DType::kF32));
    group.all_reduce(in, sum, Accumulate::kNo, stream, "reduce");
    EXPECT_EQ(to_vector<float>(sum), once);
    group.reduce_scatter(in, sum, Accumulate::kNo, stream, "scatter");
    EXPECT_EQ(to_vector<float>(sum), once);
  }
}

TEST(NcclOneGpuTest, CollectivesOfOneRankAreTheIdentity) {
  for (const bool canonical : {true, false}) {
    run_nccl_ranks(1, {.canonical = canonical}, [](ProcessGroup& world) {
      exercise(world);
      exercise(*world.split(0, 0));
      exercise(world);
    });
  }
}

TEST(NcclOneGpuTest, AProcessAlone) {
  const auto world = join_nccl({}, 0);
  exercise(*world);
  exercise(*world->split(3, 0));
}

TEST(NcclOneGpuTest, AnAbortStays) {
  try {
    run_nccl_ranks(1, {}, [](ProcessGroup& world) {
      const Stream stream = Stream::cuda("comm", 0);
      const Memory memory(stream);
      const Tensor t = numbers(memory, DType::kF32);
      world.broadcast(t, 0, stream, "before");
      world.abort("the user gave up");
      stream.synchronize();
      EXPECT_THROW(world.check(), CommError);
      world.broadcast(t, 0, stream, "after");
    });
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the user gave up"));
  }
}

}  // namespace
}  // namespace tessera::comm

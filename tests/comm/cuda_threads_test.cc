// Ranks as threads on GPU memory: the conformance suite, with a GPU for all and with one for each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>

#include "comm/threads.h"
#include "engine/cuda.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_threads.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using ::testing::HasSubstr;

// Rank r on GPU r, or as many GPUs as there are.
int gpu_of(int rank, bool share) { return share ? 0 : rank % engine::cuda::num_devices(); }

Backend threads_on(std::string name, bool share) {
  const auto stream = [share](int rank, std::string stream_name, auto options) {
    return Stream::cuda(std::move(stream_name), gpu_of(rank, share), options);
  };
  return {.name = std::move(name),
          .run =
              [](int size, milliseconds deadline, const RankFunction& fn) {
                return said_by_threads(size, fn, [&](const auto& each) {
                  run_ranks(size, {.deadline = deadline}, each);
                });
              },
          .here = stream,
          .beside = stream,
          .num_large = 5003,
          .deadline = milliseconds(300)};
}

auto backends() {
  return ::testing::Values(threads_on("one_gpu", true), threads_on("gpus", false));
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

TEST(CudaThreadsTest, MoreRanksThanAKernelTakesAreRefused) {
  const auto groups = make_threads_world(65, {.deadline = kLong});
  const Place here{Stream::cuda("comm", 0)};
  const Tensor in = Tensor::zeros(here.memory, {1}, DType::kF32);
  const Tensor out = Tensor::zeros(here.memory, {65}, DType::kF32);
  EXPECT_THROW(groups[0]->all_gather(in, out, here.stream, "x"), InvalidArgument);
}

TEST(CudaThreadsTest, TensorsOfAnotherDeviceAreRefused) {
  const auto groups = make_threads_world(1, {.deadline = kLong});
  const Place here{Stream::cuda("comm", 0)};
  const Tensor on_gpu = Tensor::zeros(here.memory, {1}, DType::kF32, "on_gpu");
  const Tensor on_cpu = Tensor::zeros(Memory(), {1}, DType::kF32, "on_cpu");
  const auto refused = [&](const Tensor& in, const Tensor& out, const Stream& stream,
                           const std::string& text) {
    try {
      groups[0]->all_gather(in, out, stream, "x");
      ADD_FAILURE() << "expected an error with " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refused(on_cpu, on_gpu, here.stream, "expected memory of cuda:0, got cpu:0 (on_cpu, rank 0)");
  refused(on_gpu, on_cpu, here.stream, "expected memory of cuda:0, got cpu:0 (on_cpu, rank 0)");
  refused(on_gpu, on_gpu, Stream::inline_cpu("cpu"),
          "expected memory of cpu:0, got cuda:0 (on_gpu, rank 0)");
}

}  // namespace
}  // namespace tessera::comm

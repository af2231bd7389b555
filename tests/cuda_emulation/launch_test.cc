// Kernels on streams of the emulated runtime, as engine/cuda_launch.cuh starts them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cuda_emulation/races.h"
#include "tests/emulator/control.h"
#include "tests/emulator/device.h"

namespace tessera::cuda_emulation {
namespace {

using ::testing::HasSubstr;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorName(error));
}

class LaunchTest : public ::testing::Test {
 protected:
  static constexpr int kNumel = 1000;

  LaunchTest() {
    reset();
    check(cudaSetDevice(0));
    check(cudaStreamCreateWithFlags(&a_, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&b_, cudaStreamNonBlocking));
    check(cudaMalloc(reinterpret_cast<void**>(&x_), kNumel * sizeof(int)));
    check(cudaMemsetAsync(x_, 0, kNumel * sizeof(int), a_));
    check(cudaStreamSynchronize(a_));
  }
  ~LaunchTest() override {
    reset();
    EXPECT_EQ(cudaFree(x_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(a_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(b_), cudaSuccess);
    EXPECT_EQ(num_races, 0);
  }

  template <class... Params, class... Args>
  static cudaError_t launch(cudaStream_t stream, const GridShape& shape, void (*kernel)(Params...),
                            Args... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_nbytes;
    config.stream = stream;
    return launch_kernel(config, kernel, args...);
  }
  std::vector<int> read() const {
    std::vector<int> values(kNumel);
    check(cudaMemcpyAsync(values.data(), x_, kNumel * sizeof(int), cudaMemcpyDeviceToHost, a_));
    check(cudaStreamSynchronize(a_));
    return values;
  }

  cudaStream_t a_ = nullptr, b_ = nullptr;
  int* x_ = nullptr;
};

struct Slice {
  int* begin;
  int numel;
};

__global__ void add(Slice slice, int value, const int* others) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < slice.numel) slice.begin[i] += value + (others != nullptr ? others[i] : 0);
}

TEST_F(LaunchTest, AddressesInArgumentsReachTheirStorage) {
  check(launch(a_, {dim3(8), dim3(128)}, add, Slice{x_, kNumel}, 3, nullptr));
  check(launch(a_, {dim3(8), dim3(128)}, add, Slice{x_ + 500, 500}, 4, x_));
  const std::vector<int> values = read();
  EXPECT_EQ(values[499], 3);
  EXPECT_EQ(values[500], 10);
}

// Each thread has a copy of the arguments, as on the device.
__global__ void change_arguments(Slice slice) {
  slice.begin += blockIdx.x * blockDim.x + threadIdx.x;
  slice.begin[0] = --slice.numel;
}

TEST_F(LaunchTest, ArgumentsBelongToTheThread) {
  check(launch(a_, {dim3(10), dim3(100)}, change_arguments, Slice{x_, 8}));
  EXPECT_EQ(read(), std::vector<int>(kNumel, 7));
}

__global__ void leave_before_barrier(int* x) {
  if (threadIdx.x == 9) return;
  __syncthreads();
  x[threadIdx.x] = 1;
}

TEST_F(LaunchTest, MisusedBarrierIsAStickyFailureThatSaysWhere) {
  check(launch(a_, {dim3(2), dim3(64)}, leave_before_barrier, x_));
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaErrorLaunchFailure);
  EXPECT_THAT(fault(0), HasSubstr("kernel tessera::cuda_emulation::leave_before_barrier, block ("));
  EXPECT_THAT(fault(0), HasSubstr("among them thread (9, 0, 0)"));
}

TEST_F(LaunchTest, StreamsThatRaceAreReported) {
  const GridShape shape{dim3(8), dim3(128)};
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  check(launch(a_, shape, add, Slice{x_, kNumel}, 1, nullptr));
  check(cudaEventRecord(event, a_));
  check(cudaStreamWaitEvent(b_, event, 0));
  check(launch(b_, shape, add, Slice{x_, kNumel}, 1, nullptr));
  check(cudaStreamSynchronize(b_));
  EXPECT_EQ(read(), std::vector<int>(kNumel, 2));
  EXPECT_EQ(num_races, 0);
  check(launch(a_, shape, add, Slice{x_, kNumel}, 1, nullptr));
  check(launch(b_, shape, add, Slice{x_, kNumel}, 1, nullptr));
  check(cudaStreamSynchronize(a_));
  check(cudaStreamSynchronize(b_));
  EXPECT_GE(num_races, kSeesRaces ? 1 : 0);
  num_races = 0;
  check(cudaEventDestroy(event));
}

}  // namespace
}  // namespace tessera::cuda_emulation

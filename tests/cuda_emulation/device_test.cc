// What the emulated device promises to kernels, and that it notices what kernels must not do.
#include "tests/emulator/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/dtype.h"
#include "ops/mma.cuh"
#include "tests/cuda_emulation/device_testing.h"

namespace tessera::cuda_emulation {
namespace {

using ::testing::HasSubstr;

std::vector<int> iota(int count) {
  std::vector<int> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// --- threads, blocks and their order

__global__ void count_visits(int* visits, dim3 grid, dim3 block) {
  if (gridDim.x != grid.x || gridDim.y != grid.y || gridDim.z != grid.z) return;
  if (blockDim.x != block.x || blockDim.y != block.y || blockDim.z != block.z) return;
  const unsigned b = blockIdx.x + grid.x * (blockIdx.y + grid.y * blockIdx.z);
  const unsigned t = threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
  ++visits[b * block.x * block.y * block.z + t];
}

TEST_F(DeviceTest, EveryThreadOfEveryBlockRunsOnce) {
  const std::vector<GridShape> shapes = {
      {dim3(1), dim3(1)},     {dim3(5), dim3(33)},   {dim3(7, 2, 3), dim3(5, 3, 2)},
      {dim3(2), dim3(31, 2)}, {dim3(3), dim3(1024)}, {dim3(1, 6), dim3(8, 8, 16)},
  };
  for (const GridShape& shape : shapes) {
    const unsigned num_threads =
        shape.grid.x * shape.grid.y * shape.grid.z * shape.block.x * shape.block.y * shape.block.z;
    std::vector<int> visits(num_threads);
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      run(shape, seed, count_visits, visits.data(), shape.grid, shape.block);
    }
    EXPECT_EQ(visits, std::vector<int>(num_threads, kSeeds));
  }
}

__global__ void note_order(int* order, int* next, bool barrier) {
  if (barrier) __syncthreads();
  order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

TEST_F(DeviceTest, SeedChoosesTheOrderOfThreadsAndBlocks) {
  for (const bool barrier : {false, true}) {
    std::set<std::vector<int>> orders;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      std::vector<int> order(4 * 96), again(4 * 96);
      int next = 0, next_again = 0;
      run({dim3(4), dim3(96)}, seed, note_order, order.data(), &next, barrier);
      run({dim3(4), dim3(96)}, seed, note_order, again.data(), &next_again, barrier);
      EXPECT_EQ(order, again);
      EXPECT_EQ(order == iota(4 * 96), seed == 0);
      orders.insert(order);
      std::sort(order.begin(), order.end());
      EXPECT_EQ(order, iota(4 * 96));
    }
    EXPECT_EQ(orders.size(), kSeeds);
  }
}

// --- barriers and shared memory

__device__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ float block_sum(float x) {
  __shared__ float parts[32];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = warp_sum(x);
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  float sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += parts[i];
  __syncthreads();
  return sum;
}

__global__ void sum_rows(float* y, const float* x, int numel) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < numel; i += static_cast<int>(blockDim.x)) {
    sum += x[static_cast<int>(blockIdx.x) * numel + i];
  }
  const float first = block_sum(sum), second = block_sum(2 * sum);
  if (threadIdx.x == 0) y[blockIdx.x] = first + second;
}

TEST_F(DeviceTest, ReductionsWithShufflesAndSharedMemoryAreRight) {
  constexpr int kRows = 5, kNumel = 1025;
  std::vector<float> x(kRows * kNumel);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
  for (const unsigned block : {32u, 96u, 256u, 1024u}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      std::vector<float> y(kRows);
      run({dim3(kRows), dim3(block)}, seed, sum_rows, y.data(), static_cast<const float*>(x.data()),
          kNumel);
      for (int row = 0; row < kRows; ++row) {
        const float* begin = x.data() + row * kNumel;
        EXPECT_EQ(y[row], 3 * std::accumulate(begin, begin + kNumel, 0.0f));
      }
    }
  }
}

template <bool kBarrier>
__global__ void reverse(int* y) {
  __shared__ int tile[128];
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kBarrier) __syncthreads();
  y[threadIdx.x] = tile[127 - threadIdx.x];
}

template <bool kBarrier>
__global__ void reverse_dynamic(int* y) {
  auto* tile = static_cast<int*>(dynamic_shared_memory());
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kBarrier) __syncthreads();
  y[threadIdx.x] = tile[127 - threadIdx.x];
}

template <bool kBarrier>
__global__ void reverse_warps(int* y) {
  __shared__ int tile[128];
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kBarrier) __syncwarp();
  y[threadIdx.x] = tile[threadIdx.x ^ 31u];
}

int wrong_runs(const GridShape& shape, void (*kernel)(int*), unsigned flip) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<int> y(128);
    run(shape, seed, kernel, y.data());
    bool right = true;
    for (unsigned i = 0; i < 128; ++i) right = right && y[i] == static_cast<int>(i ^ flip);
    wrong += right ? 0 : 1;
  }
  return wrong;
}

TEST_F(DeviceTest, MissingBarrierIsAWrongResultAndARace) {
  const GridShape shape{dim3(1), dim3(128), 0};
  EXPECT_EQ(wrong_runs(shape, reverse<true>, 127), 0);
  expect_races([&] { EXPECT_GT(wrong_runs(shape, reverse<false>, 127), 0); });
  const GridShape dynamic{dim3(1), dim3(128), 512};
  EXPECT_EQ(wrong_runs(dynamic, reverse_dynamic<true>, 127), 0);
  expect_races([&] { EXPECT_GT(wrong_runs(dynamic, reverse_dynamic<false>, 127), 0); });
  EXPECT_EQ(wrong_runs(shape, reverse_warps<true>, 31), 0);
  expect_races([&] { EXPECT_GT(wrong_runs(shape, reverse_warps<false>, 31), 0); });
}

__global__ void shift_in_place(int* y, bool barrier) {
  __shared__ int tile[256];
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  for (int i = 0; i < 3; ++i) {
    const int neighbour = tile[(threadIdx.x + 37) % 256];
    if (barrier) __syncthreads();
    tile[threadIdx.x] = neighbour;
    __syncthreads();
  }
  y[threadIdx.x] = tile[threadIdx.x];
}

TEST_F(DeviceTest, MissingBarrierBeforeAWriteIsAWrongResult) {
  for (const bool barrier : {true, false}) {
    const auto shift = [&] {
      int wrong = 0;
      for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        std::vector<int> y(256);
        run({dim3(1), dim3(256)}, seed, shift_in_place, y.data(), barrier);
        for (int i = 0; i < 256; ++i) wrong += y[i] == (i + 3 * 37) % 256 ? 0 : 1;
      }
      return wrong;
    };
    if (barrier) {
      EXPECT_EQ(shift(), 0);
    } else {
      expect_races([&] { EXPECT_GT(shift(), 0); });
    }
  }
}

template <bool kWarpBarrier>
__global__ void shuffle_is_no_barrier(int* y) {
  __shared__ int tile[32];
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  y[threadIdx.x] = __shfl_sync(~0u, 1, 0);
  if (kWarpBarrier) __syncwarp();
  y[threadIdx.x] += tile[31 - threadIdx.x];
}

TEST_F(DeviceTest, ShufflesOrderNoMemory) {
  std::vector<int> y(32);
  run({dim3(1), dim3(32)}, 1, shuffle_is_no_barrier<true>, y.data());
  expect_races([&] { run({dim3(1), dim3(32)}, 1, shuffle_is_no_barrier<false>, y.data()); });
}

__global__ void accumulate(float* sum) { *sum += 1; }

__global__ void add_elements(float* y) { y[blockIdx.x * blockDim.x + threadIdx.x] += 1; }

TEST_F(DeviceTest, BlocksThatMeetNowhereAreUnordered) {
  std::vector<float> y(64 * 64);
  run({dim3(64), dim3(64)}, 1, add_elements, y.data());
  run({dim3(64), dim3(64)}, 2, add_elements, y.data());
  EXPECT_EQ(y, std::vector<float>(64 * 64, 2.0f));
  float sum = 0;
  expect_races([&] { run({dim3(16), dim3(1)}, 1, accumulate, &sum); });
}

__global__ void poisoned(std::uint32_t* y, int dynamic_numel) {
  __shared__ std::uint32_t words[3];
  alignas(16) __shared__ engine::BFloat16 halves[2];
  const auto* dynamic = static_cast<const std::uint32_t*>(dynamic_shared_memory());
  y[0] &= words[0] & words[1] & words[2];
  y[1] &= halves[0].bits | static_cast<std::uint32_t>(halves[1].bits) << 16;
  for (int i = 0; i < dynamic_numel; ++i) y[2] &= dynamic[i];
  __syncthreads();
  words[0] = words[1] = words[2] = 0;
  halves[0] = halves[1] = {};
  static_cast<std::uint32_t*>(dynamic_shared_memory())[0] = 0;
}

__device__ std::uint32_t read_and_clear() {
  __shared__ std::uint32_t word;
  const std::uint32_t read = word;
  __syncthreads();
  word = 0;
  return read;
}

template <class T>
__global__ void poisoned_elsewhere(std::uint32_t* y) {
  __shared__ T own;
  y[0] &= read_and_clear();
  y[1] &= static_cast<std::uint32_t>(own);
  own = 0;
}

TEST_F(DeviceTest, SharedMemoryIsPoisonedWhenABlockStarts) {
  constexpr std::uint32_t kAll = ~0u;
  std::vector<std::uint32_t> y(3, kAll);
  run({dim3(3), dim3(1), 400}, 0, poisoned, y.data(), 100);
  run({dim3(3), dim3(1), 400}, 1, poisoned, y.data(), 100);
  EXPECT_EQ(y, std::vector<std::uint32_t>(3, kAll));
  run({dim3(3), dim3(1)}, 0, poisoned_elsewhere<unsigned>, y.data());
  run({dim3(3), dim3(1)}, 1, poisoned_elsewhere<int>, y.data());
  EXPECT_EQ(y, std::vector<std::uint32_t>(3, kAll));
  // Every OS thread has its own.
  std::thread([&] { run({dim3(3), dim3(1)}, 0, poisoned_elsewhere<int>, y.data()); }).join();
  EXPECT_EQ(y, std::vector<std::uint32_t>(3, kAll));
}

__global__ void count_predicates(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  const int first = __syncthreads_count(i % 3 == 0);
  const int second = __syncthreads_count(i < 5);
  y[threadIdx.x] = first * 1000 + second * 10 + (__syncthreads_or(i == 77) ? 4 : 0) +
                   (__syncthreads_and(i < 99) ? 2 : 0) + (__syncthreads_and(i < 98) ? 1 : 0);
}

TEST_F(DeviceTest, BarriersCombinePredicates) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<int> y(99);
    run({dim3(1), dim3(99)}, seed, count_predicates, y.data());
    EXPECT_EQ(y, std::vector<int>(99, 33056));
  }
}

// --- what must not be

__global__ void diverge(int* y) {
  if (threadIdx.x < 40) {
    __syncthreads();
    y[threadIdx.x] = 1;
  } else {
    __syncthreads();
    y[threadIdx.x] = 2;
  }
}

__global__ void leave_early(int* y) {
  if (threadIdx.x == 70) return;
  __syncthreads();
  y[threadIdx.x] = 1;
}

__global__ void barrier_against_shuffle(int* y) {
  if (threadIdx.x % 32 == 3) {
    __syncthreads();
  } else {
    y[threadIdx.x] = __shfl_sync(~0u, 1, 0);
    __syncthreads();
  }
}

__global__ void different_masks(int* y) {
  y[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? ~0u : 0xFFFF0000u, 1, 0);
}

__global__ void mask_without_caller(int* y) { y[threadIdx.x] = __shfl_sync(0xFFFEu, 1, 1); }

__global__ void throws_in_kernel() { throw std::out_of_range("too far"); }

TEST_F(DeviceTest, MisusedBarriersEndTheLaunchWithKernelBlockThreadAndPlace) {
  std::vector<int> y(128);
  const GridShape shape{dim3(3), dim3(128)};
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    std::string error = error_of(shape, seed, diverge, y.data());
    EXPECT_THAT(error, HasSubstr("kernel tessera::cuda_emulation::diverge, block ("));
    EXPECT_THAT(error, HasSubstr("reached __syncthreads while thread ("));
    EXPECT_THAT(error, HasSubstr("device_test.cc:"));
    error = error_of(shape, seed, leave_early, y.data());
    EXPECT_THAT(error, HasSubstr("127 wait in __syncthreads"));
    EXPECT_THAT(error, HasSubstr("1 have left the kernel, among them thread (70, 0, 0)"));
    error = error_of(shape, seed, barrier_against_shuffle, y.data());
    EXPECT_THAT(error, HasSubstr("4 wait in __syncthreads"));
    EXPECT_THAT(error, HasSubstr("waits in __shfl_sync"));
    EXPECT_THAT(error_of(shape, seed, different_masks, y.data()), HasSubstr("__shfl_sync"));
    EXPECT_THAT(error_of(shape, seed, mask_without_caller, y.data()), HasSubstr("mask"));
    EXPECT_THAT(error_of(shape, seed, throws_in_kernel), HasSubstr("too far"));
    // What comes after a failure is not touched by it.
    EXPECT_EQ(wrong_runs({dim3(1), dim3(128)}, reverse<true>, 127), 0);
  }
}

// --- warp functions

__global__ void shuffles(int* y, int width) {
  const int lane = static_cast<int>(threadIdx.x);
  int* mine = y + lane * 6;
  mine[0] = __shfl_sync(~0u, lane, 5, width);
  mine[1] = __shfl_up_sync(~0u, lane, 3, width);
  mine[2] = __shfl_down_sync(~0u, lane, 3, width);
  mine[3] = __shfl_xor_sync(~0u, lane, 5, width);
  mine[4] = static_cast<int>(2 * __shfl_sync(~0u, 0.5 * lane, lane + 1, width));
  mine[5] = __shfl_sync(~0u, static_cast<std::int16_t>(-lane), lane + 1, width);
}

TEST_F(DeviceTest, ShufflesReadTheLaneThatCudaNames) {
  for (const int width : {32, 16, 8}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      std::vector<int> y(32 * 6);
      run({dim3(1), dim3(32)}, seed, shuffles, y.data(), width);
      for (int lane = 0; lane < 32; ++lane) {
        const int begin = lane / width * width;
        const int* mine = y.data() + lane * 6;
        EXPECT_EQ(mine[0], begin + 5);
        EXPECT_EQ(mine[1], lane - 3 >= begin ? lane - 3 : lane);
        EXPECT_EQ(mine[2], lane + 3 < begin + width ? lane + 3 : lane);
        EXPECT_EQ(mine[3], lane ^ 5);
        EXPECT_EQ(mine[4], begin + (lane + 1) % width);
        EXPECT_EQ(mine[5], -(begin + (lane + 1) % width));
      }
    }
  }
}

__global__ void votes(unsigned* y) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  unsigned* mine = y + threadIdx.x * 6;
  mine[0] = __ballot_sync(~0u, lane % 5 == 0);
  // The halves of a warp by themselves.
  const unsigned half = lane < 16 ? 0xFFFFu : 0xFFFF0000u;
  mine[1] = __ballot_sync(half, lane % 3 == 0);
  mine[2] = static_cast<unsigned>(__any_sync(half, lane == 20));
  mine[3] = static_cast<unsigned>(__all_sync(half, lane < 16));
  mine[4] = __reduce_add_sync(~0u, static_cast<unsigned>(lane));
  mine[5] = static_cast<unsigned>(__reduce_max_sync(half, lane - 31) + 31);
}

TEST_F(DeviceTest, VotesCountTheLanesOfTheirMask) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<unsigned> y(64 * 6);
    run({dim3(1), dim3(64)}, seed, votes, y.data());
    for (unsigned thread = 0; thread < 64; ++thread) {
      const bool low = thread % 32 < 16;
      const std::vector<unsigned> mine(y.begin() + thread * 6, y.begin() + thread * 6 + 6);
      EXPECT_EQ(mine, (std::vector<unsigned>{0x42108421u, low ? 0x9249u : 0x49240000u, !low, low,
                                             496u, low ? 15u : 31u}));
    }
  }
}

__global__ void sum_down(float* y) {
  if (threadIdx.x >= 40) return;
  float x = 1;
  x += __shfl_down_sync(~0u, x, 16);
  y[threadIdx.x] = x;
}

TEST_F(DeviceTest, LanesThatHaveLeftReadAsPoison) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> y(40);
    run({dim3(1), dim3(64)}, seed, sum_down, y.data());
    EXPECT_EQ(y[10], 2.0f);
    EXPECT_TRUE(std::isnan(y[35]));
  }
}

// --- atomics

__global__ void atomics(unsigned* count, float* sum, int* largest, unsigned long long* smallest,
                        unsigned* bits, int* taken) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(count, 1u);
  atomicAdd(sum, 1.0f);
  atomicMax(largest, i - 5);
  atomicMin(smallest, static_cast<unsigned long long>(7 + i));
  atomicOr(bits, 1u << i % 20);
  if (atomicCAS(taken, 0, i + 1) == 0) atomicExch(taken + 1, i + 1);
}

TEST_F(DeviceTest, AtomicsHoldBetweenThreadsAndStreams) {
  unsigned count = 0, bits = 0;
  float sum = 0;
  int largest = -100, taken[2] = {};
  unsigned long long smallest = ~0ull;
  const auto stream = [&](std::uint64_t seed) {
    run({dim3(20), dim3(128)}, seed, atomics, &count, &sum, &largest, &smallest, &bits,
        static_cast<int*>(taken));
  };
  std::thread other(stream, 1);
  stream(2);
  other.join();
  EXPECT_EQ(count, 5120u);
  EXPECT_EQ(sum, 5120.0f);
  EXPECT_EQ(largest, 2559 - 5);
  EXPECT_EQ(smallest, 7ull);
  EXPECT_EQ(bits, 0xFFFFFu);
  EXPECT_EQ(taken[0], taken[1]);
  EXPECT_GT(taken[0], 0);
}

// --- arithmetic

__global__ void arithmetic(float* f, unsigned* u) {
  f[0] = rsqrtf(4.0f);
  f[1] = __expf(1.0f);
  f[2] = __fmaf_rn(2.0f, 3.0f, 4.0f);
  f[3] = max(1.0f, std::numeric_limits<float>::quiet_NaN());
  f[4] = __uint_as_float(__float_as_uint(-1.5f));
  f[5] = static_cast<float>(min(3, -2));
  u[0] = static_cast<unsigned>(__popc(0xF0F0u));
  u[1] = static_cast<unsigned>(__clz(1));
  u[2] = static_cast<unsigned>(__ffs(8));
  u[3] = __umulhi(0x80000000u, 6u);
  u[4] = __brev(1u);
  u[5] = ops::pack_bf16(1.0f, -2.0f);
}

TEST_F(DeviceTest, IntrinsicsComputeWhatTheirNamesSay) {
  std::vector<float> f(6);
  std::vector<unsigned> u(6);
  run({dim3(1), dim3(1)}, 0, arithmetic, f.data(), u.data());
  EXPECT_EQ(f, (std::vector<float>{0.5f, std::exp(1.0f), 10.0f, 1.0f, -1.5f, -2.0f}));
  EXPECT_EQ(u, (std::vector<unsigned>{8, 31, 4, 3, 0x80000000u, 0xC0003F80u}));
}

}  // namespace
}  // namespace tessera::cuda_emulation

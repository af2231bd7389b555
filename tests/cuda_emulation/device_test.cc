// What the emulated device promises to kernels, and that it notices what kernels must not do.
#include "tests/emulator/device.h"
#include "tests/cuda_emulation/races.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/dtype.h"
#include "ops/mma.cuh"
#include "ops/turns.cuh"

namespace tessera::cuda_emulation {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kSeeds = 12;  // 0 is the natural order

template <class... Params, class... Args>
void run(const GridShape& shape, std::uint64_t seed, void (*kernel)(Params...), Args... args) {
  run_grid(kernel_symbols(reinterpret_cast<const void*>(kernel)), shape, seed,
           [&] { kernel(args...); });
}

template <class... Params, class... Args>
std::string error_of(const GridShape& shape, std::uint64_t seed, void (*kernel)(Params...),
                     Args... args) {
  try {
    run(shape, seed, kernel, args...);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

/// Races reported while `fn` runs.
int races_of(const std::function<void()>& fn) {
  const int before = num_races;
  fn();
  return num_races - before;
}

// A test that reports a race it does not provoke fails.
class DeviceTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(num_races - num_races_before_, expected_races_); }
  void expect_races(const std::function<void()>& fn) {
    const int races = races_of(fn);
    expected_races_ += races;
    EXPECT_GE(races, kSeesRaces ? 1 : 0);
  }

 private:
  int num_races_before_ = num_races;
  int expected_races_ = 0;
};

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

// --- blocks that wait for each other

constexpr unsigned kAdders = 9, kTiles = 3;

// What a block adds: sums of these depend on their order.
__device__ float addend(unsigned number, unsigned tile) {
  return (number % 3 == 1 ? 0x1p25f : number % 3 == 2 ? -0x1p25f : 1.0f) + static_cast<float>(tile);
}

enum class Turns { kByTickets, kByBlocks, kFromTheLast, kIgnored };

template <Turns kTurns>
__global__ void add_by_turns(float* sums, unsigned* counters) {
  auto* number = static_cast<unsigned*>(dynamic_shared_memory());
  if (threadIdx.x == 0) {
    const unsigned ticket = ops::draw_ticket(counters);
    *number = kTurns == Turns::kByBlocks      ? blockIdx.x
              : kTurns == Turns::kFromTheLast ? gridDim.x - 1 - ticket
                                              : ticket;
  }
  __syncthreads();
  for (unsigned tile = 0; tile < kTiles; ++tile) {
    const unsigned warp = threadIdx.x / 32;
    unsigned* turn = counters + 1 + tile * (blockDim.x / 32) + warp;
    float* sum = sums + (tile * blockDim.x + threadIdx.x) * 4;
    if (kTurns != Turns::kIgnored) ops::await_turn(turn, *number);
    const float x = addend(*number, tile);
    if (*number == 0)
      ops::assign_in_l2(sum, {x, x, x, x});
    else
      ops::add_in_l2(sum, {x, x, x, x});
    ops::end_turn(turn, *number);
  }
}

constexpr unsigned kAdderThreads = 64;
constexpr GridShape kAdderShape{dim3(kAdders), dim3(kAdderThreads), sizeof(unsigned)};

int wrong_sums(void (*kernel)(float*, unsigned*), std::uint64_t seed) {
  struct alignas(16) Four {
    float values[4];
  };
  std::vector<Four> sums(kTiles * kAdderThreads);
  std::vector<unsigned> counters(1 + kTiles * kAdderThreads / 32);
  run(kAdderShape, seed, kernel, sums.data()->values, counters.data());
  int wrong = 0;
  for (unsigned tile = 0; tile < kTiles; ++tile) {
    float want = 0;
    for (unsigned number = 0; number < kAdders; ++number) want += addend(number, tile);
    for (unsigned thread = 0; thread < kAdderThreads; ++thread)
      wrong += sums[tile * kAdderThreads + thread].values[thread % 4] == want ? 0 : 1;
  }
  return wrong;
}

TEST_F(DeviceTest, BlocksAddByTurns) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    EXPECT_EQ(wrong_sums(add_by_turns<Turns::kByTickets>, seed), 0);
}

TEST_F(DeviceTest, BlocksThatDoNotWaitForTheirTurnAreAWrongResultAndARace) {
  expect_races([&] {
    int wrong = 0;
    for (std::uint64_t seed = 1; seed < kSeeds; ++seed)
      wrong += wrong_sums(add_by_turns<Turns::kIgnored>, seed);
    EXPECT_GT(wrong, 0);
  });
}

__global__ void wait_in_vain(unsigned* flag) { ops::await_turn(flag, 1); }

__global__ void wait_with_static_memory(unsigned* flag) {
  __shared__ unsigned word;
  if (threadIdx.x == 0) word = 1;
  __syncthreads();
  ops::await_turn(flag, word);
}

TEST_F(DeviceTest, BlocksThatWaitForOnesThatCannotStartEndTheLaunch) {
  std::vector<float> sums(kTiles * kAdderThreads * 4 + 4);
  float* const aligned =
      sums.data() + (16 - reinterpret_cast<std::uintptr_t>(sums.data()) % 16) / 4;
  const auto failures = [&](void (*kernel)(float*, unsigned*)) {
    int count = 0;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      std::vector<unsigned> counters(1 + kTiles * kAdderThreads / 32);
      const std::string error = error_of(kAdderShape, seed, kernel, aligned, counters.data());
      if (error.empty()) continue;
      ++count;
      EXPECT_THAT(error, HasSubstr("turns.cuh:"));
      EXPECT_THAT(error, HasSubstr("no block can go on"));
    }
    return count;
  };
  EXPECT_EQ(failures(add_by_turns<Turns::kByTickets>), 0);
  EXPECT_EQ(failures(add_by_turns<Turns::kFromTheLast>), static_cast<int>(kSeeds));
  const int by_blocks = failures(add_by_turns<Turns::kByBlocks>);
  EXPECT_GT(by_blocks, 0);
  EXPECT_LT(by_blocks, static_cast<int>(kSeeds)) << "blocks start in the natural order, too";
  // What comes after a failure is not touched by it.
  EXPECT_EQ(wrong_sums(add_by_turns<Turns::kByTickets>, 1), 0);

  unsigned flag = 0;
  EXPECT_THAT(error_of({dim3(1), dim3(64)}, 1, wait_in_vain, &flag),
              HasSubstr("no block can go on"));
  EXPECT_THAT(error_of({dim3(1), dim3(64)}, 1, wait_with_static_memory, &flag),
              HasSubstr("waits for others with static shared memory"));
}

// The thread that is waited for is in the same warp, another warp or another block.
__global__ void wait_for_the_last(unsigned* flags, unsigned* sum) {
  const unsigned last = gridDim.x * blockDim.x - 1;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  while (i != last && load_acquire(flags + i + 1) == 0) __nanosleep(1);
  *sum += i;
  store_release(flags + i, 1);
}

TEST_F(DeviceTest, ThreadsWaitForAnyOthersUnderWay) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<unsigned> flags(4 * 96);
    unsigned sum = 0;
    run({dim3(4), dim3(96)}, seed, wait_for_the_last, flags.data(), &sum);
    EXPECT_EQ(sum, 4u * 96 * (4 * 96 - 1) / 2);
  }
}

// --- tensor cores

std::uint16_t bf16(float x) { return engine::BFloat16::from_float(x).bits; }
float f32(std::uint16_t bits) { return engine::BFloat16{bits}.to_float(); }

struct Matrices {
  alignas(16) std::uint16_t a[16][16];
  alignas(16) std::uint16_t b[16][8];    // k x n
  alignas(16) std::uint16_t b_t[8][16];  // n x k
  float c[16][8];
};

Matrices random_matrices(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Matrices m;
  for (auto& row : m.a)
    std::generate(std::begin(row), std::end(row), [&] { return bf16(normal(random)); });
  for (auto& row : m.c)
    std::generate(std::begin(row), std::end(row), [&] { return normal(random); });
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 8; ++n) m.b[k][n] = m.b_t[n][k] = bf16(normal(random));
  }
  return m;
}

void expect_product(const float (&d)[16][8], const Matrices& m, float scale) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double sum = m.c[row][column], size = std::fabs(sum);
      for (int k = 0; k < 16; ++k) {
        const double product = double{f32(m.a[row][k])} * f32(m.b[k][column]) * scale;
        sum += product;
        size += std::fabs(product);
      }
      EXPECT_NEAR(d[row][column], sum, 17 * size * std::numeric_limits<float>::epsilon());
    }
  }
}

// Registers filled element by element, as "Matrix Fragments for mma.m16n8k16" of the PTX ISA says.
__global__ void multiply_fragments(float (*d)[8], const Matrices* m) {
  const int lane = static_cast<int>(threadIdx.x % 32), group = lane >> 2, in_group = lane % 4;
  std::uint32_t a[4] = {}, b[2] = {};
  float c[4];
  for (int i = 0; i < 8; ++i) {
    const int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
    const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
    a[i / 2] |= static_cast<std::uint32_t>(m->a[row][column]) << 16 * (i % 2);
  }
  for (int i = 0; i < 4; ++i) {
    const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
    b[i / 2] |= static_cast<std::uint32_t>(m->b[row][group]) << 16 * (i % 2);
  }
  const auto row = [&](int i) { return i < 2 ? group : group + 8; };
  const auto column = [&](int i) { return in_group * 2 + (i & 1); };
  for (int i = 0; i < 4; ++i) c[i] = m->c[row(i)][column(i)];
  ops::mma_m16n8k16(c, a, b);
  for (int i = 0; i < 4; ++i) d[row(i)][column(i)] = c[i];
}

TEST_F(DeviceTest, MmaMultipliesTheDocumentedFragments) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Matrices m = random_matrices(static_cast<unsigned>(seed));
    float d[16][8];
    run({dim3(1), dim3(32)}, seed, multiply_fragments, static_cast<float(*)[8]>(d), &m);
    expect_product(d, m, 1);
  }
}

// Both operands from shared memory, B stored either way round, and A through a register pack.
__global__ void multiply_tiles(float (*d)[8], const Matrices* m, bool b_is_transposed) {
  __shared__ Matrices tile;
  const int lane = static_cast<int>(threadIdx.x);
  ops::cp_async_16(&tile.a[lane / 2][lane % 2 * 8], &m->a[lane / 2][lane % 2 * 8]);
  if (lane < 16) {
    ops::cp_async_16(tile.b[lane], m->b[lane]);
    ops::cp_async_16(&tile.b_t[lane / 2][lane % 2 * 8], &m->b_t[lane / 2][lane % 2 * 8]);
  }
  ops::cp_async_commit();
  ops::cp_async_wait<0>();
  __syncwarp();
  std::uint32_t a[4], b[2];
  ops::ldmatrix_x4(a, &tile.a[lane % 16][lane / 16 * 8]);
  if (b_is_transposed) {
    ops::ldmatrix_x2(b, &tile.b_t[lane % 8][lane / 8 % 2 * 8]);
  } else {
    ops::ldmatrix_x2_trans(b, tile.b[lane % 16]);
  }
  const int group = lane / 4, in_group = lane % 4;
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = m->c[group + i / 2 * 8][in_group * 2 + i % 2];
  ops::mma_m16n8k16(c, a, b);
  for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][in_group * 2 + i % 2] = c[i];
}

TEST_F(DeviceTest, LdmatrixFeedsMma) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Matrices m = random_matrices(static_cast<unsigned>(100 + seed));
    for (const bool transposed : {false, true}) {
      float d[16][8];
      run({dim3(1), dim3(32)}, seed, multiply_tiles, static_cast<float(*)[8]>(d), &m, transposed);
      expect_product(d, m, 1);
    }
  }
}

__global__ void load_fragments(std::uint32_t* y, bool transposed) {
  alignas(16) __shared__ std::uint16_t rows[32][8];
  for (int i = 0; i < 8; ++i)
    rows[threadIdx.x][i] = static_cast<std::uint16_t>(threadIdx.x * 8 + i);
  __syncwarp();
  std::uint32_t r[4];
  if (transposed) {
    ops::ldmatrix_x4_trans(r, rows[threadIdx.x]);
  } else {
    ops::ldmatrix_x4(r, rows[threadIdx.x]);
  }
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = r[i];
}

TEST_F(DeviceTest, LdmatrixHandsOutTheDocumentedElements) {
  for (const bool transposed : {false, true}) {
    std::vector<std::uint32_t> y(32 * 4);
    run({dim3(1), dim3(32)}, 1, load_fragments, y.data(), transposed);
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = lane / 4, column = lane % 4 * 2;
        const unsigned low = transposed ? column * 8 + row : row * 8 + column;
        const unsigned high = transposed ? (column + 1) * 8 + row : row * 8 + column + 1;
        EXPECT_EQ(y[lane * 4 + i], (i * 64 + low) | (i * 64 + high) << 16);
      }
    }
  }
}

__global__ void pipeline(uint4* y, const uint4* x, int num_waited) {
  auto* tile = static_cast<uint4*>(dynamic_shared_memory());
  for (unsigned stage = 0; stage < 3; ++stage) {
    ops::cp_async_16(&tile[stage * 32 + threadIdx.x], &x[stage * 32 + threadIdx.x],
                     threadIdx.x != 9);
    if (stage < 2) ops::cp_async_commit();
  }
  if (num_waited == 1) ops::cp_async_wait<1>();
  if (num_waited == 2) ops::cp_async_wait<0>();
  if (num_waited == 3) ops::cp_async_wait_all();
  for (unsigned stage = 0; stage < 3; ++stage) {
    y[stage * 32 + threadIdx.x] = tile[stage * 32 + threadIdx.x];
  }
}

TEST_F(DeviceTest, AsyncCopiesLandWhenTheirGroupIsWaitedFor) {
  std::vector<uint4> x(96), y(96);
  for (unsigned i = 0; i < 96; ++i) x[i] = {i, i + 1, i + 2, i + 3};
  for (int num_waited = 0; num_waited <= 3; ++num_waited) {
    run({dim3(2), dim3(32), 96 * 16}, 1, pipeline, y.data(), static_cast<const uint4*>(x.data()),
        num_waited);
    for (unsigned i = 0; i < 96; ++i) {
      const unsigned expected = i / 32 >= static_cast<unsigned>(num_waited) ? ~0u
                                : i % 32 == 9                               ? 0u
                                                                            : i;
      EXPECT_EQ(y[i].x, expected);
      EXPECT_EQ(y[i].w, expected == i ? i + 3 : expected);
    }
  }
}

__global__ void read_others_copy(uint4* y, const uint4* x, bool barrier) {
  auto* tile = static_cast<uint4*>(dynamic_shared_memory());
  ops::cp_async_16(&tile[threadIdx.x], &x[threadIdx.x]);
  ops::cp_async_wait_all();
  if (barrier) __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];
}

TEST_F(DeviceTest, WaitingForCopiesIsNoBarrier) {
  std::vector<uint4> x(64, uint4{1, 2, 3, 4}), y(64);
  const auto num_wrong = [&](bool barrier) {
    int wrong = 0;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      run({dim3(1), dim3(64), 64 * 16}, seed, read_others_copy, y.data(),
          static_cast<const uint4*>(x.data()), barrier);
      for (const uint4& value : y) wrong += value.z == 3 ? 0 : 1;
    }
    return wrong;
  };
  EXPECT_EQ(num_wrong(true), 0);
  expect_races([&] { EXPECT_GT(num_wrong(false), 0); });
}

__global__ void misaligned(const std::uint16_t* x) {
  auto* tile = static_cast<std::uint16_t*>(dynamic_shared_memory());
  if (blockIdx.x == 0) ops::cp_async_16(tile, x + 1);
  std::uint32_t r[4];
  ops::ldmatrix_x4(r, tile + 4);
}

__global__ void wide_access(float* y, int offset, bool writes) {
  auto wide = engine::Packed<float>::load(writes ? y : y + offset);
  wide.store(writes ? y + offset : y);
}

TEST_F(DeviceTest, WideAccessesCheckTheirAddresses) {
  alignas(16) float y[8] = {};
  for (const bool writes : {false, true}) {
    EXPECT_EQ(error_of({dim3(1), dim3(1)}, 0, wide_access, y, 4, writes), "");
    EXPECT_THAT(error_of({dim3(1), dim3(1)}, 0, wide_access, y, 2, writes),
                HasSubstr("misaligned address"));
  }
}

__global__ void half_a_warp(float* y) {
  float d[4] = {};
  const std::uint32_t a[4] = {}, b[2] = {};
  if (threadIdx.x < 16) ops::mma_m16n8k16(d, a, b);
  y[threadIdx.x] = d[0];
}

TEST_F(DeviceTest, TensorCoreFunctionsCheckTheirCallers) {
  alignas(16) std::uint16_t x[16] = {};
  EXPECT_THAT(
      error_of({dim3(1), dim3(32), 1024}, 0, misaligned, static_cast<const std::uint16_t*>(x)),
      HasSubstr("cp.async with an address that is not 16-byte aligned"));
  std::vector<float> y(32);
  EXPECT_THAT(error_of({dim3(1), dim3(32)}, 0, half_a_warp, y.data()),
              HasSubstr("needs all 32 lanes"));
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

// Blocks of the emulated device that wait for each other: in turns, in vain, and for any other.
#include "tests/emulator/device.h"  // first, as nvcc includes what it stands for of its own accord

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/turns.cuh"
#include "tests/cuda_emulation/device_testing.h"

namespace tessera::cuda_emulation {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace tessera::cuda_emulation

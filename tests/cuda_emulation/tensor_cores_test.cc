// Tensor cores of the emulated device: fragments, ldmatrix and asynchronous copies as documented.
#include "tests/emulator/device.h"  // first, as nvcc includes what it stands for of its own accord

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "engine/dtype.h"
#include "ops/mma.cuh"
#include "tests/cuda_emulation/device_testing.h"

namespace tessera::cuda_emulation {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace tessera::cuda_emulation

// Products of warpgroups on the emulated device: that they read the layouts of the PTX ISA, and
// that what must not be left out, or touched, is noticed.
#include "tests/emulator/device.h"
// Kernels find it included already, as nvcc includes what it stands for.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/dtype.h"
#include "ops/mma.cuh"
#include "ops/wgmma.cuh"
#include "tests/cuda_emulation/seeded_runs.h"

namespace tessera::cuda_emulation {
namespace {

using engine::BFloat16;
using ::testing::HasSubstr;

constexpr int kM = 64, kN = 64, kK = 16;

struct Matrices {
  float a[kM][kK], b[kN][kK], c[kM][kN], d[kM][kN];  // d = c + a b^T
};

// Of small integers: sums are exact.
Matrices random_matrices(unsigned seed) {
  std::mt19937 random(seed);
  const auto fill = [&](auto& matrix) {
    for (auto& row : matrix)
      for (float& x : row) x = static_cast<float>(static_cast<int>(random() % 33) - 16);
  };
  Matrices m;
  fill(m.a), fill(m.b), fill(m.c);
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      m.d[i][j] = m.c[i][j];
      for (int k = 0; k < kK; ++k) m.d[i][j] += m.a[i][k] * m.b[j][k];
    }
  }
  return m;
}

// A canonical layout as the PTX ISA writes it, ((s0, s1, s2), (s3, s4)) : ((d0, ...), (...)) in
// elements of (M or N, K), after Swizzle<bits, 4, 3> of the address in bytes.
struct Layout {
  std::string name;
  bool is_transposed;
  unsigned mode, bits;  // of the swizzle
  std::array<unsigned, 5> shape, stride;
  unsigned lbo, sbo;  // in elements

  unsigned at(unsigned row, unsigned k) const {
    const unsigned s0 = shape[0], s1 = shape[1], s3 = shape[3];
    const unsigned element = row % s0 * stride[0] + row / s0 % s1 * stride[1] +
                             row / (s0 * s1) * stride[2] + k % s3 * stride[3] + k / s3 * stride[4];
    const unsigned byte = 2 * element, mask = (1u << bits) - 1;
    return byte ^ ((byte >> 7 & mask) << 4);
  }
  std::uint64_t descriptor(std::uint32_t address) const {
    return std::uint64_t{mode} << 62 | std::uint64_t{2 * sbo / 16} << 32 |
           std::uint64_t{2 * lbo / 16} << 16 | address / 16;
  }
};

// For 64 by 16. Those of MN-major are the examples of the PTX ISA, made as long.
const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {"K-major", false, 0, 0, {8, 8, 1, 8, 2}, {8, 64, 0, 1, 512}, 512, 64},
      {"K-major 32", false, 3, 1, {8, 8, 1, 8, 2}, {16, 128, 0, 1, 8}, 8, 128},
      {"K-major 64", false, 2, 2, {8, 8, 1, 8, 2}, {32, 256, 0, 1, 8}, 8, 256},
      {"K-major 128", false, 1, 3, {8, 8, 1, 8, 2}, {64, 512, 0, 1, 8}, 8, 512},
      {"MN-major", true, 0, 0, {8, 1, 8, 8, 2}, {1, 8, 64, 8, 512}, 512, 64},
      {"MN-major 32", true, 3, 1, {8, 2, 4, 8, 2}, {1, 8, 128, 16, 512}, 128, 512},
      {"MN-major 64", true, 2, 2, {8, 4, 2, 8, 2}, {1, 8, 256, 32, 512}, 256, 512},
      {"MN-major 128", true, 1, 3, {8, 8, 1, 8, 2}, {1, 8, 0, 64, 512}, 8, 512},
  };
  return all;
}

// What a kernel does wrong.
enum class Fault {
  kNone,
  kNoRegisterFence,
  kNoFenceBetween,
  kNoCommit,
  kNoWait,
  kResultNotNamed,
  kNoProxyFence,
  kProxyFenceTooEarly,
  kNoBarrier,
  kPlainStore,
  kOperandWritten,
  kWrittenAfterwards,
  kLeftWritten,
  kLeftWrittenBefore,
  kAccumulatorWritten,
  kNamedUnderWay,
  kOtherDescriptor,
  kOneWarpLess,
  kOneLaneLess,
  kBaseOffset,
};

constexpr int kOperandNbytes = 8192;
constexpr GridShape kShape{dim3(1), dim3(128), ops::kAtomNbytes + 3 * kOperandNbytes};

__device__ void store(unsigned char* tile, const Layout& layout, const float (*from)[kK]) {
  for (unsigned i = threadIdx.x; i < 64 * kK / 2; i += 128) {
    const unsigned row = layout.is_transposed ? i % 32 * 2 : i / 8;
    const unsigned k = layout.is_transposed ? i / 32 : i % 8 * 2;
    const float next = layout.is_transposed ? from[row + 1][k] : from[row][k + 1];
    ops::store_operand(reinterpret_cast<BFloat16*>(tile + layout.at(row, k)),
                       ops::pack_bf16(from[row][k], next));
  }
}

template <bool kATransposed>
__device__ void multiply(float (&d)[8][4], std::uint64_t a, std::uint64_t b, bool b_is_transposed) {
  if (b_is_transposed) {
    ops::wgmma<kATransposed, true>(d, a, b, true);
  } else {
    ops::wgmma<kATransposed, false>(d, a, b, true);
  }
}

__global__ void multiply_kernel(float (*result)[kN], const Matrices* m, const Layout* layout_a,
                                const Layout* layout_b, bool a_in_registers, Fault fault) {
  auto* a_tile = reinterpret_cast<unsigned char*>(ops::first_atom());
  unsigned char* b_tile = a_tile + kOperandNbytes;
  if (fault == Fault::kPlainStore) {
    for (int i = threadIdx.x; i < kOperandNbytes; i += 128) b_tile[i] = 0;
    __syncthreads();
  }
  if (fault == Fault::kProxyFenceTooEarly) ops::fence_async_proxy();
  store(a_tile, *layout_a, m->a);
  store(b_tile, *layout_b, m->b);
  if (fault != Fault::kNoProxyFence && fault != Fault::kProxyFenceTooEarly)
    ops::fence_async_proxy();
  if (fault != Fault::kNoBarrier) __syncthreads();
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned row = 16 * warp + g;
  float d[8][4];
  for (unsigned n = 0; n < 8; ++n)
    for (unsigned i = 0; i < 4; ++i) d[n][i] = m->c[row + 8 * (i / 2)][8 * n + 2 * t + i % 2];
  std::uint32_t a[4];
  for (unsigned r = 0; r < 4; ++r) {
    const float* pair = &m->a[row + 8 * (r % 2)][2 * t + 8 * (r / 2)];
    a[r] = ops::pack_bf16(pair[0], pair[1]);
  }
  std::uint64_t descriptor_a = layout_a->descriptor(ops::shared_address(a_tile));
  const std::uint64_t descriptor_b = layout_b->descriptor(ops::shared_address(b_tile));
  if (fault == Fault::kOtherDescriptor && warp == 2) descriptor_a ^= 1 << 16;
  if (fault == Fault::kBaseOffset) descriptor_a |= std::uint64_t{1} << 49;
  if (fault != Fault::kNoRegisterFence) ops::wgmma_fence(d, a);
  if (fault == Fault::kLeftWrittenBefore) a[0] ^= 1;
  if (fault == Fault::kOneLaneLess && threadIdx.x == 7) return;
  if (fault != Fault::kOneWarpLess || warp != 1) {
    if (a_in_registers && layout_b->is_transposed) {
      ops::wgmma<true>(d, a, descriptor_b, true);
    } else if (a_in_registers) {
      ops::wgmma<false>(d, a, descriptor_b, true);
    } else if (layout_a->is_transposed) {
      multiply<true>(d, descriptor_a, descriptor_b, layout_b->is_transposed);
    } else {
      multiply<false>(d, descriptor_a, descriptor_b, layout_b->is_transposed);
    }
  }
  if (fault == Fault::kNamedUnderWay) ops::wgmma_fence(d);
  if (fault == Fault::kAccumulatorWritten) d[7][3] = 0;
  if (fault == Fault::kLeftWritten) a[3] ^= 1;
  if (fault == Fault::kOperandWritten && threadIdx.x == 9)
    ops::store_operand(reinterpret_cast<BFloat16*>(b_tile + layout_b->at(6, 4)), 0x12345678);
  if (fault != Fault::kNoCommit) ops::wgmma_commit();
  if (fault == Fault::kResultNotNamed) {
    ops::wgmma_wait<0>();
  } else if (fault != Fault::kNoWait) {
    ops::wgmma_wait<0>(d);
  }
  if (fault == Fault::kNoFenceBetween) {
    multiply<false>(d, descriptor_a, descriptor_b, false);
    ops::wgmma_commit();
    ops::wgmma_wait<0>(d);
  }
  if (fault == Fault::kWrittenAfterwards && threadIdx.x == 9)
    ops::store_operand(reinterpret_cast<BFloat16*>(b_tile + layout_b->at(6, 4)), 0x12345678);
  for (unsigned n = 0; n < 8; ++n)
    for (unsigned i = 0; i < 4; ++i) result[row + 8 * (i / 2)][8 * n + 2 * t + i % 2] = d[n][i];
}

struct Product {
  float d[kM][kN] = {};
};

bool equal(const Product& product, const Matrices& m) {
  bool equal = true;
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j) equal &= product.d[i][j] == m.d[i][j];
  return equal;
}

TEST(WgmmaTest, ReadsTheDocumentedLayouts) {
  for (const Layout& a : layouts()) {
    for (const Layout& b : layouts()) {
      for (const bool in_registers : {false, true}) {
        for (const std::uint64_t seed : {0, 1}) {
          const Matrices m = random_matrices(static_cast<unsigned>(seed));
          Product got;
          run(kShape, seed, multiply_kernel, static_cast<float(*)[kN]>(got.d), &m, &a, &b,
              in_registers, Fault::kNone);
          EXPECT_TRUE(equal(got, m)) << a.name << ", " << b.name << ", " << in_registers;
        }
      }
    }
  }
}

TEST(WgmmaTest, PanelsAreTheLayoutsThatDescriptorsSay) {
  const Layout &k_major = layouts()[3], &mn_major = layouts()[7];
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 16; ++column) {
      EXPECT_EQ(2 * ops::panel_at(row, column), k_major.at(row, column));
      EXPECT_EQ(2 * ops::panel_at(column, row), mn_major.at(row, column));
    }
  }
}

// What is said of each fault; empty: nothing, and wrong results.
struct Noticed {
  Fault fault;
  bool a_in_registers;
  std::string text;
};

TEST(WgmmaTest, NoticesWhatIsLeftOutOrTouched) {
  const std::vector<Noticed> all = {
      {Fault::kNoRegisterFence, false, "an accumulator that no wgmma_fence has named"},
      {Fault::kNoRegisterFence, true, "a left operand that no wgmma_fence has named"},
      {Fault::kNoFenceBetween, false, "an accumulator that no wgmma_fence has named"},
      {Fault::kNoCommit, false, "names an accumulator of a product under way"},
      {Fault::kNoWait, false, "has left the kernel with wgmma under way"},
      {Fault::kResultNotNamed, false, ""},
      {Fault::kNoProxyFence, false, "whose writer has not called fence_async_proxy"},
      {Fault::kProxyFenceTooEarly, true, "whose writer has not called fence_async_proxy"},
      {Fault::kNoBarrier, false, "wgmma reads shared memory at"},
      {Fault::kWrittenAfterwards, true, "shared memory"},
      {Fault::kOperandWritten, true, "shared memory"},
      {Fault::kLeftWritten, true, "a left operand was written while its wgmma was under way"},
      {Fault::kLeftWrittenBefore, true, "a left operand that was written since wgmma_fence"},
      {Fault::kAccumulatorWritten, false, "an accumulator was written before a wgmma_wait"},
      {Fault::kNamedUnderWay, false, "wgmma_fence names an accumulator of a product under way"},
      {Fault::kOtherDescriptor, false, "operands that differ by warp of the warpgroup"},
      {Fault::kOneWarpLess, true, "has left out wgmma that others of its warpgroup issued"},
      {Fault::kOneLaneLess, true, "wgmma.mma_async"},
      {Fault::kBaseOffset, false, "a base offset, which is not emulated"},
  };
  const Matrices m = random_matrices(5);
  const Layout& layout = layouts()[3];
  for (const Noticed& noticed : all) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      Product got;
      const std::string error =
          error_of(kShape, seed, multiply_kernel, static_cast<float(*)[kN]>(got.d), &m, &layout,
                   &layout, noticed.a_in_registers, noticed.fault);
      if (noticed.text.empty()) {
        EXPECT_EQ(error, "");
        EXPECT_FALSE(equal(got, m));
      } else {
        EXPECT_THAT(error, HasSubstr(noticed.text)) << static_cast<int>(noticed.fault);
      }
    }
  }
}

// A plain store is not seen, and what only plain stores wrote is not readable.
TEST(WgmmaTest, OperandsAreWrittenByWhatKnowsThem) {
  Layout beyond = layouts()[3];
  beyond.sbo += 64;  // so that the last rows are some that nobody else wrote
  const Matrices m = random_matrices(6);
  Product got;
  EXPECT_THAT(error_of(kShape, 0, multiply_kernel, static_cast<float(*)[kN]>(got.d), &m,
                       &layouts()[3], &beyond, true, Fault::kPlainStore),
              HasSubstr("that neither cp_async_16 nor store_operand wrote"));
}

// Groups: the first of two is over, the second is not.
__global__ void two_groups_kernel(float* first, float* second, int* was_poison) {
  BFloat16* tile = ops::first_atom();
  for (unsigned i = threadIdx.x; i < 64 * 64 / 2; i += 128)
    ops::store_operand(tile + 2 * i, ops::pack_bf16(1, 1));
  ops::fence_async_proxy();
  __syncthreads();
  float x[8][4] = {}, y[8][4] = {};
  const std::uint64_t operand = ops::operand_at(tile);
  ops::wgmma_fence(x, y);
  ops::wgmma<false, false>(x, operand, operand, true);
  ops::wgmma_commit();
  ops::wgmma<false, true>(y, operand, operand, true);
  ops::wgmma<false, true>(y, operand, ops::advance(operand, ops::kNextMnMajor), true);
  ops::wgmma_commit();
  ops::wgmma_wait<1>(x);
  first[threadIdx.x] = x[7][3];
  was_poison[threadIdx.x] = y[7][3] != y[7][3] ? 1 : 0;
  ops::wgmma_wait<0>(y);
  second[threadIdx.x] = y[7][3];
}

TEST(WgmmaTest, WaitsForGroupsInTheirOrder) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> first(128), second(128);
    std::vector<int> was_poison(128);
    run(kShape, seed, two_groups_kernel, first.data(), second.data(), was_poison.data());
    EXPECT_EQ(first, std::vector<float>(128, 16));
    EXPECT_EQ(second, std::vector<float>(128, 32));
    EXPECT_EQ(was_poison, std::vector<int>(128, 1));
  }
}

}  // namespace
}  // namespace tessera::cuda_emulation

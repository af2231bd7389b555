// Compiled without ThreadSanitizer (see BUILD): the exchange between lanes orders no memory.
#include "tests/emulator/mma.h"

#include <algorithm>
#include <bit>

namespace tessera::cuda_emulation {
namespace {

constexpr unsigned kLanes = 32;

float low(std::uint32_t word) { return std::bit_cast<float>(word << 16); }
float high(std::uint32_t word) { return std::bit_cast<float>(word & 0xFFFF0000u); }

struct MmaLane {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

void mma(void* const (&lanes)[kLanes], std::uint32_t) {
  alignas(32) float a[16][16], b[16][8], d[16][8];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const auto& mine = *static_cast<const MmaLane*>(lanes[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned r = 0; r < 4; ++r) {
      float* pair = &a[g + 8 * (r & 1)][2 * t + 8 * (r >> 1)];
      pair[0] = low(mine.a[r]);
      pair[1] = high(mine.a[r]);
    }
    for (unsigned r = 0; r < 2; ++r) {
      b[2 * t + 8 * r][g] = low(mine.b[r]);
      b[2 * t + 8 * r + 1][g] = high(mine.b[r]);
    }
    for (unsigned i = 0; i < 4; ++i) d[g + 8 * (i >> 1)][2 * t + (i & 1)] = mine.d[i];
  }
  for (unsigned row = 0; row < 16; ++row) {
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const auto& mine = *static_cast<const MmaLane*>(lanes[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; ++i) mine.d[i] = d[g + 8 * (i >> 1)][2 * t + (i & 1)];
  }
}

struct LoadLane {
  const internal::Row* row;
  std::uint32_t* r;
  unsigned num_matrices;
  bool transposed;
};

std::uint32_t element(const internal::Row& row, unsigned column) {
  return row.words[column / 2] >> (16 * (column % 2)) & 0xFFFFu;
}

void load(void* const (&lanes)[kLanes], std::uint32_t) {
  const auto row_of = [&](unsigned matrix, unsigned row) -> const internal::Row& {
    return *static_cast<const LoadLane*>(lanes[8 * matrix + row])->row;
  };
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const auto& mine = *static_cast<const LoadLane*>(lanes[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < mine.num_matrices; ++i) {
      mine.r[i] = mine.transposed
                      ? element(row_of(i, 2 * t), g) | element(row_of(i, 2 * t + 1), g) << 16
                      : row_of(i, g).words[t];
    }
  }
}

const Collective kMma{"mma.m16n8k16", true, false, mma};
const Collective kLoad{"ldmatrix", true, false, load};

}  // namespace

void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                  Place where) {
  MmaLane mine{d, a, b};
  meet(kMma, ~0u, &mine, where);
}

void internal::exchange_rows(std::uint32_t* r, unsigned num_matrices, const Row& row,
                             bool transposed, Place where) {
  LoadLane mine{&row, r, num_matrices, transposed};
  meet(kLoad, ~0u, &mine, where);
}

}  // namespace tessera::cuda_emulation

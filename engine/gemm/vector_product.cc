#include "engine/gemm/vector_product.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "engine/isa.h"

namespace tessera::engine {
namespace {

constexpr std::int64_t kLanes = 16;
using Vector [[gnu::vector_size(kLanes * sizeof(float))]] = float;

// The first `count` lanes; the others are 0.
[[gnu::always_inline]] inline void load(Vector& v, const float* src, std::int64_t count = kLanes) {
  v = Vector{};
  std::memcpy(&v, src, static_cast<std::size_t>(count) * sizeof(float));
}

// y[j..j + kRows) of a B of which each column lies in one piece.
template <int kRows>
[[gnu::always_inline]] inline void multiply_columns(const VectorProduct& p, std::int64_t j) {
  const float* const b = p.b + j * p.ldb;
  Vector sums[kRows][2] = {};
  const auto add = [&](std::int64_t i, int half, std::int64_t count) {
    Vector x, column;
    load(x, p.x + i, count);
    for (int r = 0; r < kRows; ++r) {
      load(column, b + r * p.ldb + i, count);
      sums[r][half] += column * x;
    }
  };
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= p.k; i += 2 * kLanes) {
    add(i, 0, kLanes);
    add(i + kLanes, 1, kLanes);
  }
  if (i + kLanes <= p.k) {
    add(i, 0, kLanes);
    i += kLanes;
    if (i < p.k) add(i, 1, p.k - i);
  } else if (i < p.k) {
    add(i, 0, p.k - i);
  }
  for (int r = 0; r < kRows; ++r) {
    Vector sum = sums[r][0] + sums[r][1];
    for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
      for (std::int64_t lane = 0; lane < width; ++lane) sum[lane] += sum[lane + width];
    p.y[j + r] = p.accumulate ? p.y[j + r] + sum[0] : sum[0];
  }
}

// Adds kRows rows of B, from row `i`, times their elements of x.
template <int kRows>
[[gnu::always_inline]] inline void add_rows(const VectorProduct& p, std::int64_t i) {
  const float* const b = p.b + i * p.ldb;
  std::int64_t j = 0;
  for (; j + kLanes <= p.n; j += kLanes) {
    Vector sum, row;
    load(sum, p.y + j);
    for (int r = 0; r < kRows; ++r) {
      load(row, b + r * p.ldb + j);
      sum += row * p.x[i + r];
    }
    std::memcpy(p.y + j, &sum, sizeof(sum));
  }
  for (; j < p.n; ++j)
    for (int r = 0; r < kRows; ++r) p.y[j] += b[r * p.ldb + j] * p.x[i + r];
}

}  // namespace

void VectorProduct::run() const {
  with_isa([this] {
    if (b_transposed) {
      std::int64_t j = 0;
      for (; j + 4 <= n; j += 4) multiply_columns<4>(*this, j);
      for (; j < n; ++j) multiply_columns<1>(*this, j);
      return;
    }
    if (!accumulate) std::fill_n(y, n, 0.0f);
    std::int64_t i = 0;
    for (; i + 8 <= k; i += 8) add_rows<8>(*this, i);
    for (; i < k; ++i) add_rows<1>(*this, i);
  });
}

}  // namespace tessera::engine

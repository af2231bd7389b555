#include "engine/gemm/portable_tiles.h"

#include <cmath>

#include "engine/isa.h"

namespace tessera::engine {
namespace {

// Numbers below the least normal one are 0, operands and results alike.
[[gnu::always_inline]] inline float flushed(float v) {
  return std::abs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v;
}

[[gnu::always_inline]] inline float from_bits(std::uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return flushed(v);
}

[[gnu::always_inline]] inline float low(std::uint32_t word) { return from_bits(word << 16); }
[[gnu::always_inline]] inline float high(std::uint32_t word) {
  return from_bits(word & 0xffff0000u);
}

}  // namespace

// As Intel's manual says of TDPBF16PS: the lower halves of words have a sum of their own, and so
// have the upper, each multiplication fused with its addition; C takes the sum of both.
void PortableTiles::add_product(Tile& c, const Tile& a, const Tile& b) {
  with_isa([&] {
    for (std::size_t m = 0; m < 16; ++m) {
      std::array<float, 16> of_low{}, of_high{};
      for (std::size_t k = 0; k < 16; ++k) {
        const float x = low(a[m][k]), y = high(a[m][k]);
        for (std::size_t n = 0; n < 16; ++n) {
          of_low[n] = flushed(std::fma(x, low(b[k][n]), of_low[n]));
          of_high[n] = flushed(std::fma(y, high(b[k][n]), of_high[n]));
        }
      }
      for (std::size_t n = 0; n < 16; ++n) {
        const float sum = flushed(from_bits(c[m][n]) + flushed(of_low[n] + of_high[n]));
        std::memcpy(&c[m][n], &sum, sizeof(sum));
      }
    }
  });
}

}  // namespace tessera::engine

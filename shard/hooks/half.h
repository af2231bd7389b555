// IEEE binary16 as 16 bits of storage: a format of the wire alone, as no tensor has it.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera::shard {

struct Float16 {
  std::uint16_t bits = 0;

  /// Rounds to nearest, ties to even. From 65520 on infinity; NaN stays NaN.
  static constexpr Float16 from_float(float x) {
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = u >> 16 & 0x8000u, a = u & 0x7FFFFFFFu;
    std::uint32_t h = 0;
    if (a > 0x7F800000u) {
      h = 0x7E00u;
    } else if (a >= 0x477FF000u) {
      h = 0x7C00u;
    } else if (a >= 0x38800000u) {  // normal: the exponent's bias goes from 127 to 15
      h = (a + 0xFFFu + (a >> 13 & 1u) - 0x38000000u) >> 13;
    } else if (a > 0x33000000u) {  // subnormal: a multiple of 2^-24
      const std::uint32_t shift = 126 - (a >> 23), m = (a & 0x7FFFFFu) | 0x800000u;
      h = (m + ((1u << (shift - 1)) - 1) + (m >> shift & 1u)) >> shift;
    }
    return Float16{static_cast<std::uint16_t>(sign | h)};
  }
  constexpr float to_float() const {
    const std::uint32_t sign = (bits & 0x8000u) << 16, a = bits & 0x7FFFu;
    if (a >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (a & 0x3FFu) << 13);
    if (a >= 0x400u) return std::bit_cast<float>(sign | ((a << 13) + 0x38000000u));
    const float magnitude = static_cast<float>(a) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
};

}  // namespace tessera::shard

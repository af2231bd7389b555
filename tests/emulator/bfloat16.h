// bf16 as the emulated libraries read and round it. The engine's own type is out of reach: the
// engine is built on this library.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera::cuda_emulation {

struct BFloat16 {
  std::uint16_t bits;
};

inline float to_f32(float x) { return x; }
inline float to_f32(BFloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

inline void store_f32(float& dst, float x) { dst = x; }
/// Rounds to nearest, ties to even; NaN stays NaN.
inline void store_f32(BFloat16& dst, float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = x != x ? u | 0x400000u : u + 0x7FFFu + ((u >> 16) & 1u);
  dst.bits = static_cast<std::uint16_t>(rounded >> 16);
}
inline float round_to_bf16(float x) {
  BFloat16 rounded;
  store_f32(rounded, x);
  return to_f32(rounded);
}

}  // namespace tessera::cuda_emulation

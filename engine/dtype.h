// Element types and the bf16 storage type.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "engine/error.h"

namespace tessera::engine {

enum class DType : std::uint8_t { kF32, kBF16, kI32, kI64, kU8 };

/// bfloat16 storage: the upper half of an f32. Arithmetic happens in f32.
struct BFloat16 {
  std::uint16_t bits = 0;

  /// Rounds to nearest, ties to even; NaN stays NaN (quiet).
  static constexpr BFloat16 from_float(float x) {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {  // one instruction for ten; of a NaN it keeps no payload
      BFloat16 y;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
      return y;
    }
#endif
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (u >> 16) | 0x0040u;
    const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    return BFloat16{static_cast<std::uint16_t>(is_nan ? nan : rounded)};
  }
  constexpr float to_float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::kU8;
};

/// Loads and stores that let one kernel template serve f32 and bf16 storage.
constexpr float to_f32(float x) { return x; }
constexpr float to_f32(BFloat16 x) { return x.to_float(); }
constexpr void store_f32(float& dst, float x) { dst = x; }
constexpr void store_f32(BFloat16& dst, float x) { dst = BFloat16::from_float(x); }

/// Calls `fn(T{})` with T = float or BFloat16. Throws InvalidArgument for any other dtype.
template <class F>
decltype(auto) dispatch_float(DType dtype, std::string_view where, F&& fn) {
  if (dtype == DType::kF32) return fn(float{});
  if (dtype == DType::kBF16) return fn(BFloat16{});
  fail("[{}] expected f32 or bf16, got {}", where, name_of(dtype));
}

}  // namespace tessera::engine

// bf16 rounding against a slow reference; sizes and names of element types.
#include "engine/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
BFloat16 bf16(std::uint32_t bits) { return BFloat16{static_cast<std::uint16_t>(bits)}; }

// The nearer of the two bf16 around x, by distance in double; ties go to the even one. What would
// follow the largest finite one counts as infinity, 2^128.
std::uint16_t slow_round(float x) {
  const auto low = std::bit_cast<std::uint32_t>(x) >> 16, high = low + 1;
  const auto value = [](std::uint32_t bits) {
    const double v = bf16(bits).to_float();
    return std::isinf(v) ? std::copysign(std::ldexp(1.0, 128), v) : v;
  };
  const double below = std::abs(double{x} - value(low)), above = std::abs(value(high) - double{x});
  if (below == above) return static_cast<std::uint16_t>(low % 2 == 0 ? low : high);
  return static_cast<std::uint16_t>(below < above ? low : high);
}

TEST(BFloat16, EveryPatternSurvivesARoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16(bits).to_float();
    ASSERT_EQ(std::bit_cast<std::uint32_t>(x), bits << 16);
    if (std::isnan(x)) {
      ASSERT_EQ(BFloat16::from_float(x).bits, bits | 0x40) << "quiet";
    } else {
      ASSERT_EQ(BFloat16::from_float(x).bits, bits);
    }
  }
}

TEST(BFloat16, RoundsToNearestEvenAroundEveryPattern) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if (!std::isfinite(bf16(bits).to_float())) continue;
    for (const std::uint32_t tail : {1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const float x = from_bits(bits << 16 | tail);
      ASSERT_EQ(BFloat16::from_float(x).bits, slow_round(x)) << std::hexfloat << x;
    }
  }
}

TEST(BFloat16, RoundsRandomFloats) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    const float x = from_bits(static_cast<std::uint32_t>(random()));
    if (!std::isfinite(x)) continue;
    ASSERT_EQ(BFloat16::from_float(x).bits, slow_round(x)) << std::hexfloat << x;
  }
}

TEST(BFloat16, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(BFloat16::from_float(inf).bits, 0x7F80);
  EXPECT_EQ(BFloat16::from_float(-inf).bits, 0xFF80);
  EXPECT_EQ(BFloat16::from_float(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(BFloat16::from_float(-0.0f).bits, 0x8000);
  EXPECT_EQ(BFloat16::from_float(1.00390625f).bits, 0x3F80) << "tie to even, down";
  EXPECT_EQ(BFloat16::from_float(1.01171875f).bits, 0x3F82) << "tie to even, up";
  EXPECT_EQ(BFloat16::from_float(std::numeric_limits<float>::denorm_min()).bits, 0);
  // NaN whose payload is in the lower half must not become infinity, nor wrap around to zero.
  for (const std::uint32_t nan : {0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
    EXPECT_TRUE(std::isnan(BFloat16::from_float(from_bits(nan)).to_float())) << std::hex << nan;
  }
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kF32), 4);
  EXPECT_EQ(size_of(DType::kBF16), 2);
  EXPECT_EQ(size_of(DType::kI32), 4);
  EXPECT_EQ(size_of(DType::kI64), 8);
  EXPECT_EQ(size_of(DType::kU8), 1);
  EXPECT_EQ(name_of(DType::kBF16), "bf16");
  static_assert(DTypeOf<float>::value == DType::kF32);
  static_assert(DTypeOf<BFloat16>::value == DType::kBF16);
  static_assert(sizeof(BFloat16) == 2);
}

TEST(DispatchFloat, PicksTheTypeOrNamesTheCaller) {
  const auto size = [](auto t) { return sizeof(t); };
  EXPECT_EQ(dispatch_float(DType::kF32, "op", size), 4u);
  EXPECT_EQ(dispatch_float(DType::kBF16, "op", size), 2u);
  const std::string error = tessera::testing::error_of<InvalidArgument>(
      [&] { dispatch_float(DType::kI64, "gelu", size); });
  EXPECT_TRUE(tessera::testing::has(error, {"[gelu]", "i64"}));
}

}  // namespace
}  // namespace tessera::engine

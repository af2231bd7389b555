// Philox 4x32-10 against the known answers of its authors (Random123, kat_vectors), and what is
// built on it.
#include "engine/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace tessera::engine {
namespace {

using Words = std::array<std::uint32_t, 4>;

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Fnv1a, KnownAnswers) {
  static_assert(fnv1a("") == 0xcbf29ce484222325);
  static_assert(fnv1a("a") == 0xaf63dc4c8601ec8c);
  static_assert(fnv1a("foobar") == 0x85944171f73967e8);
  static_assert(fnv1a("bar", fnv1a("foo")) == fnv1a("foobar"));
}

TEST(RandomStream, ElementsAreAddressedByIndex) {
  const RandomStream random{5, 9};
  for (std::uint64_t block = 0; block < 10; ++block) {
    const Words words = philox(5, block, 9);
    for (std::uint64_t k = 0; k < 4; ++k) {
      EXPECT_EQ(random.bits(4 * block + k), words[k]);
      EXPECT_EQ(random.uniform(4 * block + k), RandomStream::to_uniform(words[k]));
    }
  }
  EXPECT_NE(random.bits(0), (RandomStream{5, 10}.bits(0)));
  EXPECT_NE(random.bits(0), (RandomStream{6, 9}.bits(0)));
  EXPECT_NE(random.bits(0), random.bits(std::uint64_t{1} << 34));
}

TEST(RandomStream, UniformLiesStrictlyBetweenZeroAndOne) {
  EXPECT_GT(RandomStream::to_uniform(0), 0);
  EXPECT_LT(RandomStream::to_uniform(0xFFFFFFFF), 1);
  float last = 0;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 0x10001) {
    const float u = RandomStream::to_uniform(static_cast<std::uint32_t>(bits));
    ASSERT_GE(u, last);
    last = u;
  }
  // Symmetric: no bias towards either end.
  for (const std::uint32_t bits : {0u, 0x200u, 0x12345678u, 0x7FFFFFFFu}) {
    EXPECT_EQ(RandomStream::to_uniform(bits) + RandomStream::to_uniform(~bits), 1);
  }
}

TEST(RandomStream, UniformAndNormalHaveTheirMoments) {
  const RandomStream random{1, fnv1a("moments")};
  constexpr int kNum = 200'000;
  double u1 = 0, u2 = 0, n1 = 0, n2 = 0, n3 = 0, n4 = 0, lag = 0;
  for (std::uint64_t i = 0; i < kNum; ++i) {
    const double u = random.uniform(i), n = random.normal(i);
    u1 += u;
    u2 += u * u;
    n1 += n;
    n2 += n * n;
    n3 += n * n * n;
    n4 += n * n * n * n;
    lag += n * random.normal(i ^ 1);  // the other of the pair
  }
  // Five standard errors.
  const double unit = 5 / std::sqrt(double{kNum});
  EXPECT_NEAR(u1 / kNum, 1.0 / 2, unit * std::sqrt(1.0 / 12));
  EXPECT_NEAR(u2 / kNum, 1.0 / 3, unit * std::sqrt(4.0 / 45));
  EXPECT_NEAR(n1 / kNum, 0, unit);
  EXPECT_NEAR(n2 / kNum, 1, unit * std::sqrt(2.0));
  EXPECT_NEAR(n3 / kNum, 0, unit * std::sqrt(15.0));
  EXPECT_NEAR(n4 / kNum, 3, unit * std::sqrt(96.0));
  EXPECT_NEAR(lag / kNum, 0, unit * std::sqrt(2.0));
}

TEST(RandomStream, NormalsAreMadeOfTheirOwnPairOfWords) {
  const RandomStream random{5, 9};
  for (std::uint64_t i = 0; i < 40; i += 2) {
    const double radius = std::sqrt(-2 * std::log(double{random.uniform(i)}));
    const double angle = 2 * M_PI * random.uniform(i + 1);
    EXPECT_NEAR(random.normal(i), radius * std::cos(angle), 1e-6) << i;
    EXPECT_NEAR(random.normal(i + 1), radius * std::sin(angle), 1e-6) << i;
  }
}

// On any machine: their logarithm and sines are our own.
TEST(RandomStream, NormalsHaveTheseBits) {
  const std::array<float, 8> expected = {0x1.87c208p-4f,  0x1.fec972p-1f,  -0x1.6822e4p-1f,
                                         -0x1.f816fep-2f, -0x1.796574p-1f, 0x1.82ae78p+0f,
                                         0x1.0e70aep+0f,  -0x1.f4d368p-2f};
  const RandomStream random{5, 9};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(random.normal(i), expected[i]) << i;
  EXPECT_EQ(portable_log(0.3), -0x1.34378fcbda721p+0);
}

TEST(BoxMuller, LogarithmAndSinesAreWithinTheirBounds) {
  for (std::uint32_t k = 0; k < 1u << 23; k += 97) {
    const double u = RandomStream::to_uniform(k << 9), log = std::log(u);
    ASSERT_NEAR(portable_log(u), log, 1e-15 * std::max(1.0, std::abs(log))) << u;
    ASSERT_NEAR(portable_log(u) / log, 1, 1e-15) << u;
    const auto angle = 6.283185307179586476925286766559L * u;
    const CosSin x = portable_cos_sin(u);
    ASSERT_NEAR(x.cos, static_cast<double>(std::cos(angle)), 1e-15) << u;
    ASSERT_NEAR(x.sin, static_cast<double>(std::sin(angle)), 1e-15) << u;
  }
  for (const double x : {1e-300, 0.7, 0.70710678118654752, 1.0, 1.5, 1e300}) {
    EXPECT_NEAR(portable_log(x), std::log(x), 1e-15 * std::max(1.0, std::abs(std::log(x)))) << x;
  }
  for (int eighth = 0; eighth < 8; ++eighth) {
    const CosSin x = portable_cos_sin(eighth / 8.0);
    EXPECT_NEAR(x.cos, std::cos(M_PI / 4 * eighth), 1e-15) << eighth;
    EXPECT_NEAR(x.sin, std::sin(M_PI / 4 * eighth), 1e-15) << eighth;
  }
}

TEST(RandomStream, NormalIsFiniteAtTheEnds) {
  const double least = RandomStream::to_uniform(0), most = RandomStream::to_uniform(0xFFFFFFFF);
  EXPECT_TRUE(std::isfinite(std::sqrt(-2 * std::log(least))));
  EXPECT_GE(-2 * std::log(most), 0);
}

}  // namespace
}  // namespace tessera::engine

#include "tools/probe/checksum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <vector>

namespace tessera::tools {
namespace {

std::vector<float> values(std::size_t n) {
  std::vector<float> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = std::sin(static_cast<float>(i));
  return v;
}

TEST(Checksum, OfPartsAddsUpToThatOfTheWhole) {
  const std::vector<float> v = values(100);
  const std::span<const float> all = v;
  for (const std::size_t cut :
       {std::size_t{0}, std::size_t{1}, std::size_t{37}, std::size_t{100}}) {
    Checksum sum = checksum_of(all.subspan(cut), static_cast<std::int64_t>(cut));
    sum += checksum_of(all.first(cut), 0);
    EXPECT_EQ(sum.hash, checksum_of(all, 0).hash) << cut;
    EXPECT_EQ(sum.numel, 100);
    EXPECT_EQ(sum.max_abs, checksum_of(all, 0).max_abs);
    EXPECT_NEAR(sum.sum, checksum_of(all, 0).sum, 1e-12);
  }
}

TEST(Checksum, KnowsEveryBitAndEveryPlace) {
  const std::vector<float> v = values(64);
  std::set<std::uint64_t> hashes = {checksum_of(v, 0).hash, checksum_of(v, 1).hash,
                                    checksum_of(v, std::int64_t{1} << 32).hash};
  for (std::size_t i = 0; i < v.size(); ++i) {
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<float> other = v;
      other[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(v[i]) ^ (1u << bit));
      hashes.insert(checksum_of(other, 0).hash);
    }
    if (i == 0) continue;
    std::vector<float> other = v;
    std::swap(other[i], other[i - 1]);
    hashes.insert(checksum_of(other, 0).hash);
  }
  EXPECT_EQ(hashes.size(), 3u + 64 * 32 + 63);
  EXPECT_NE(checksum_of(std::vector<float>{0.0f}, 0).hash,
            checksum_of(std::vector<float>{-0.0f}, 0).hash);
  EXPECT_NE(checksum_of(std::vector<float>{0.0f}, 0).hash, 0u);
}

TEST(Checksum, TellsWhatIsNotANumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(checksum_of(std::vector<float>{1, nan, 2}, 0).max_abs));
  EXPECT_EQ(checksum_of(std::vector<float>{1, -3, 2}, 0).max_abs, 3);
  EXPECT_EQ(checksum_of({}, 5).numel, 0);
}

}  // namespace
}  // namespace tessera::tools

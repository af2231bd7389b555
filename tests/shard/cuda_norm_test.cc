// The sum of squares on a GPU is exact: whatever the values, and however they are cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/norm.h"
#include "shard/norm_words.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Tensor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A sum of squares as one long integer, in units of the square of the smallest f32.
class LongSum {
 public:
  void add(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFu;
    const std::uint32_t exponent = bits >> 23;
    const std::uint64_t significand = (bits & 0x7FFFFFu) | (exponent == 0 ? 0 : 0x800000u);
    const std::uint64_t square = significand * significand;
    const unsigned at = 2 * (std::max(exponent, 1u) - 1);
    for (unsigned bit = 0; bit < 48; ++bit) {
      if ((square >> bit & 1) != 0) increment(at + bit);
    }
  }
  /// Rounded to nearest, ties to even.
  double value() const {
    const auto top = std::ranges::find(bits_.rbegin(), bits_.rend(), 1) - bits_.rbegin();
    const auto lowest = std::ssize(bits_) - top - 53;  // the last bit that a double holds
    std::uint64_t kept = 0;
    for (std::int64_t bit = std::ssize(bits_) - top - 1; bit >= std::max(lowest, std::int64_t{0});
         --bit) {
      kept = 2 * kept + bits_[static_cast<std::size_t>(bit)];
    }
    if (lowest <= 0) return std::ldexp(static_cast<double>(kept), -298);
    const auto below = std::span(bits_).first(static_cast<std::size_t>(lowest));
    const bool is_half = below.back() != 0;
    const bool is_more =
        std::ranges::any_of(below.first(below.size() - 1), [](int b) { return b; });
    if (is_half && (is_more || kept % 2 != 0)) ++kept;
    return std::ldexp(static_cast<double>(kept), static_cast<int>(lowest) - 298);
  }

 private:
  void increment(unsigned bit) {
    while (bits_[bit] != 0) bits_[bit++] = 0;
    bits_[bit] = 1;
  }
  std::array<std::uint8_t, 700> bits_{};
};

struct Case {
  std::string name;
  std::vector<float> values;
};

std::vector<Case> cases(std::size_t numel) {
  std::mt19937 random(7);
  std::vector<Case> all;
  const auto add = [&](const std::string& name, auto value) {
    Case made{name, std::vector<float>(numel)};
    for (std::size_t i = 0; i < numel; ++i) made.values[i] = value(i);
    all.push_back(std::move(made));
  };
  // Of any exponent up to `largest`, subnormals too.
  const auto any = [&random](std::uint32_t largest) {
    const auto exponent = static_cast<std::uint32_t>(random() % (largest + 1));
    const auto rest = static_cast<std::uint32_t>(random()) & 0x807FFFFFu;
    return std::bit_cast<float>(rest | exponent << 23);
  };
  std::normal_distribution<float> normal(0, 1e-3f);
  add("normal", [&](auto) { return normal(random); });
  add("any exponent", [&](auto) { return any(254); });
  add("low exponents", [&](auto) { return any(20); });
  add("subnormal", [&](auto) { return any(0); });
  add("zero", [&](auto i) { return i % 2 == 0 ? 0.0f : -0.0f; });
  add("one of each power",
      [&](auto i) { return std::ldexp(1.0f, static_cast<int>(i % 277) - 149); });
  add("largest", [](auto) { return std::numeric_limits<float>::max(); });
  add("smallest", [](auto) { return std::numeric_limits<float>::denorm_min(); });
  add("rarely not zero", [&](auto i) { return i % 97 == 0 ? normal(random) : 0.0f; });
  add("mostly ties", [](auto i) { return i == 0 ? 1.0f : 0x1p-27f; });
  // Ties between two f32, to the lower and to the higher one, of which many elements of one warp,
  // 28 and 29 below the largest, are the last part: none may be missing, and none count twice.
  // Spans of the GPU's sums overlap nowhere but at exponents as low as these.
  for (const bool is_upwards : {false, true}) {
    std::vector<float> of_warp = {1.0f, 0x1p-12f, 0x1p-12f};
    if (is_upwards) of_warp.insert(of_warp.end(), 4, 0x1p-12f);
    if (is_upwards) of_warp.insert(of_warp.end(), 2, 0x1p-23f);
    of_warp.insert(of_warp.end(), 176, 0x1p-28f);
    of_warp.insert(of_warp.end(), 320, 0x1p-29f);
    auto next = of_warp.begin();
    add(is_upwards ? "tie, upwards" : "tie, downwards",
        [&](auto i) { return i % 256 < 32 && next != of_warp.end() ? 0x1p-94f * *next++ : 0.0f; });
  }
  for (const int below : {15, 16, 28, 29, 31, 32, 33, 64}) {
    add(std::to_string(below) + " below",
        [&](auto i) { return std::ldexp(1.25f, i % 16 == 3 ? 1 : 1 - below); });
  }
  return all;
}

// A flat whose segments have the lengths `numels` and gaps of NaN between them, from `begin` on.
struct Laid {
  Flat flat{.parameters = {},
            .trainable = true,
            .layout = Layout({}, 1),
            .parameter_range = {},
            .gradient_range = {},
            .owned = {},
            .segments = {}};
  std::vector<float> sum;

  Laid(std::span<const float> values, std::span<const std::int64_t> numels, std::int64_t begin) {
    auto next = values.begin();
    sum.assign(static_cast<std::size_t>(begin), kNan);
    for (const std::int64_t numel : numels) {
      flat.segments.push_back({.parameter = flat.segments.size(),
                               .parameter_begin = 0,
                               .shard_begin = std::ssize(sum),
                               .numel = numel});
      sum.insert(sum.end(), next, next + numel);
      next += numel;
      sum.insert(sum.end(), 3, kNan);
    }
    EXPECT_TRUE(next == values.end());
  }
};

class CudaNorm : public ::testing::Test {
 protected:
  /// Of the parts of `parts`, each added to words of its own. `offset`: of the sums in memory.
  std::array<std::int32_t, 2> norm_of(std::vector<Laid> parts, std::int64_t offset = 0,
                                      double mean_scale = 1) {
    constexpr auto kWords = engine::Category::kCommunication;
    const std::int64_t num_words = make_norm_words(memory_).numel();
    const auto num_parts = static_cast<std::int64_t>(parts.size());
    const Tensor words =
        Tensor::zeros(memory_, {num_parts * num_words}, DType::kI64, "words", kWords);
    std::int64_t first = 0;
    std::vector<Tensor> sums;
    for (std::int64_t part = 0; part < num_parts; ++part) {
      Laid& laid = parts[static_cast<std::size_t>(part)];
      laid.flat.tiles = make_tile_table(memory_, laid.flat.segments, "tiles");
      laid.sum.insert(laid.sum.begin(), static_cast<std::size_t>(offset), kNan);
      const Tensor whole = Tensor::from<float>(memory_, {std::ssize(laid.sum)}, laid.sum, "sum");
      sums.push_back(whole.slice(offset, {whole.numel() - offset}));
      add_squares(stream_, words.slice(part * num_words, {num_words}), laid.flat, sums.back(),
                  first);
      first += std::ssize(laid.flat.segments);
    }
    const Tensor norm = Tensor::zeros(memory_, {2}, DType::kI32, "norm");
    finish_norm(stream_, norm, words, mean_scale);
    const std::vector<std::int32_t> result = engine::to_vector<std::int32_t>(norm);
    return {result[0], result[1]};
  }

  engine::Stream stream_ = engine::Stream::cuda("compute", 0);
  engine::Memory memory_{stream_};
};

float as_float(std::int32_t bits) { return std::bit_cast<float>(bits); }

TEST_F(CudaNorm, IsExactForAnyValues) {
  for (const std::int64_t numel : {1, 5, 4095, 4097, 9001}) {
    if (testing::kIsSlow && numel == 9001) continue;
    for (const Case& c : cases(static_cast<std::size_t>(numel))) {
      LongSum exact;
      for (const float x : c.values) exact.add(x);
      const auto expected = static_cast<float>(std::sqrt(exact.value()) * 0.25);
      const auto got = norm_of({Laid(c.values, std::array{numel}, 0)}, 0, 0.25);
      EXPECT_EQ(as_float(got[0]), expected) << c.name << ", " << numel << " elements";
      EXPECT_EQ(got[1], 0) << c.name;
      SquareSum on_cpu(numel);
      ASSERT_TRUE(on_cpu.try_add(c.values));
      const auto cpu = static_cast<float>(std::sqrt(on_cpu.total()) * 0.25);
      EXPECT_LE(std::abs(std::bit_cast<std::int32_t>(cpu) - got[0]), 1) << c.name;
    }
  }
}

TEST_F(CudaNorm, HasTheSameBitsHoweverItIsCut) {
  constexpr std::int64_t kNumel = 5000;
  const std::vector<std::vector<std::int64_t>> cuts = {
      {1, 4999}, {4095, 1, 904}, {3, 4, 5, 4988}, {127, 4097, 776}};
  for (const Case& c : cases(kNumel)) {
    const auto expected = norm_of({Laid(c.values, std::array{kNumel}, 0)});
    EXPECT_EQ(norm_of({Laid(c.values, std::array{kNumel}, 0)}), expected) << c.name << " again";
    for (const auto& cut : cuts) {
      if (testing::kIsSlow && cut.size() > 2) continue;
      for (const int begin : {1, 2}) {
        EXPECT_EQ(norm_of({Laid(c.values, cut, begin)}), expected) << c.name << " from " << begin;
      }
      EXPECT_EQ(norm_of({Laid(c.values, cut, 4)}, 1), expected) << c.name << ", not aligned";
      std::vector<Laid> parts;
      std::span<const float> rest = c.values;
      for (const std::int64_t numel : cut) {
        parts.emplace_back(rest.first(static_cast<std::size_t>(numel)), std::array{numel}, 0);
        rest = rest.subspan(static_cast<std::size_t>(numel));
      }
      std::ranges::reverse(parts);
      EXPECT_EQ(norm_of(std::move(parts)), expected) << c.name << " in parts";
    }
  }
}

// More tiles than there are blocks, so that a block takes several, each of another magnitude.
TEST_F(CudaNorm, IsExactForManySmallParameters) {
  std::vector<std::int64_t> numels;
  for (std::int64_t i = 0; i < 1300; ++i) numels.push_back(1 + i % 13);
  const std::int64_t numel = std::accumulate(numels.begin(), numels.end(), std::int64_t{0});
  for (Case& c : cases(static_cast<std::size_t>(numel))) {
    const auto got = norm_of({Laid(c.values, numels, 2)});
    EXPECT_EQ(got, norm_of({Laid(c.values, std::array{numel}, 0)})) << c.name;
    c.values[static_cast<std::size_t>(numel) - 1] = kNan;
    EXPECT_EQ(norm_of({Laid(c.values, numels, 2)})[1], 1300) << c.name;
  }
}

TEST_F(CudaNorm, NamesTheFirstParameterThatIsNotFinite) {
  constexpr std::array<std::int64_t, 4> kNumels = {130, 4100, 1, 9000};
  std::vector<float> values(13231, 1.0f);
  for (const float bad : {kNan, -kInfinity}) {
    std::int64_t at = 0;
    for (std::size_t parameter = 0; parameter < kNumels.size(); ++parameter) {
      for (const std::int64_t i :
           {std::int64_t{0}, kNumels[parameter] / 2, kNumels[parameter] - 1}) {
        std::vector<float> with = values;
        with[static_cast<std::size_t>(at + i)] = bad;
        with.back() = kInfinity;  // and the last one
        const auto got = norm_of({Laid(with, kNumels, 1)});
        EXPECT_EQ(got[1], static_cast<std::int32_t>(parameter) + 1) << i;
        const std::array<std::int64_t, 1> other = {7};
        const auto second =
            norm_of({Laid(std::vector<float>(7, 1.0f), other, 0), Laid(with, kNumels, 0)});
        EXPECT_EQ(second[1], static_cast<std::int32_t>(parameter) + 2) << i;
      }
      at += kNumels[parameter];
    }
  }
}

}  // namespace
}  // namespace tessera::shard

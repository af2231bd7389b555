// Copies and sums of every small size at every alignment write what they should and nothing beside.
#include "comm/threads/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/dtype.h"
#include "engine/philox.h"

namespace tessera::comm {
namespace {

using engine::BFloat16;
using engine::DType;

constexpr std::size_t kGuard = 64;  // bytes on either side that nobody may write
constexpr std::byte kUntouched{0xA5};

// Memory for `nbytes` at `misaligned` bytes past a multiple of 64, between guards.
class Guarded {
 public:
  Guarded(std::size_t nbytes, std::size_t misaligned)
      : nbytes_(nbytes), room_(nbytes + 2 * kGuard + 128, kUntouched) {
    const auto address = reinterpret_cast<std::uintptr_t>(room_.data()) + kGuard;
    data_ = room_.data() + kGuard + (64 - address % 64) % 64 + misaligned;
  }
  std::byte* data() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }
  bool is_untouched_outside() const {
    const auto is_untouched = [](std::byte b) { return b == kUntouched; };
    return std::all_of(room_.data(), static_cast<const std::byte*>(data_), is_untouched) &&
           std::all_of(static_cast<const std::byte*>(data_) + nbytes_, room_.data() + room_.size(),
                       is_untouched);
  }

 private:
  std::size_t nbytes_;
  std::vector<std::byte> room_;
  std::byte* data_;
};

TEST(Copy, WritesAllAndNothingElse) {
  std::vector<std::byte> src(300);
  for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<std::byte>(i % 251);
  for (const Store store : {Store::kCached, Store::kStreaming}) {
    for (std::size_t misaligned = 0; misaligned < 64; ++misaligned) {
      for (std::size_t n = 0; n < 200; ++n) {
        Guarded dst(n, misaligned);
        copy(dst.data(), src.data() + misaligned % 7, static_cast<std::int64_t>(n), store);
        ASSERT_EQ(std::memcmp(dst.data(), src.data() + misaligned % 7, n), 0)
            << n << " bytes at " << misaligned;
        ASSERT_TRUE(dst.is_untouched_outside()) << n << " bytes at " << misaligned;
      }
    }
  }
}

// Magnitudes differ so much that sums show their order.
float value(std::size_t rank, std::size_t i) {
  const auto bits = engine::philox(7, i, rank);
  return std::ldexp(engine::RandomStream::to_uniform(bits[0]) - 0.5f, bits[1] % 12);
}

float read(const std::vector<float>& in, std::size_t i) { return in[i]; }
float read(const std::vector<BFloat16>& in, std::size_t i) { return in[i].to_float(); }

template <class T>
void expect_rank_order(DType dtype, std::size_t num_ranks, std::size_t numel, bool starts,
                       Store store, std::size_t misaligned) {
  std::vector<std::vector<T>> ins(num_ranks, std::vector<T>(numel));
  std::vector<const void*> pointers;
  std::vector<float> start(numel), expected(numel);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    for (std::size_t i = 0; i < numel; ++i) engine::store_f32(ins[r][i], value(r, i));
    pointers.push_back(ins[r].data());
  }
  for (std::size_t i = 0; i < numel; ++i) {
    start[i] = value(99, i);
    volatile float x = starts ? start[i] : read(ins[0], i);
    for (std::size_t r = starts ? 0 : 1; r < num_ranks; ++r) x = x + read(ins[r], i);
    expected[i] = x;
  }
  const std::size_t nbytes = numel * sizeof(float);
  Guarded a(nbytes, misaligned), b(nbytes, (misaligned + 4) % 64);
  std::vector<float*> outs = {a.floats(), b.floats()};
  // The first out is the running sum.
  if (starts) std::copy(start.begin(), start.end(), a.floats());
  sum_in_rank_order(dtype, pointers, starts ? a.floats() : nullptr, outs,
                    static_cast<std::int64_t>(numel), store);
  for (Guarded* out : {&a, &b}) {
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), out->floats()));
    ASSERT_TRUE(out->is_untouched_outside());
  }
}

TEST(SumInRankOrder, OfAnyNumberOfRanksIsOneAdditionAfterTheOther) {
  for (std::size_t num_ranks = 1; num_ranks <= 20; ++num_ranks) {
    for (const bool starts : {false, true}) {
      SCOPED_TRACE(num_ranks);
      expect_rank_order<float>(DType::kF32, num_ranks, 100, starts, Store::kCached, 0);
      expect_rank_order<BFloat16>(DType::kBF16, num_ranks, 100, starts, Store::kCached, 0);
    }
  }
}

// Sums are made in tiles of 2048: of the last one there may be little left.
TEST(SumInRankOrder, WritesAllAndNothingElseForAnyLength) {
  for (const std::size_t numel : {0, 1, 2, 3, 5, 2047, 2048, 2049, 2050, 2053, 4097}) {
    for (const Store store : {Store::kCached, Store::kStreaming}) {
      for (std::size_t misaligned = 0; misaligned < 64; misaligned += 4) {
        for (const bool starts : {false, true}) {
          SCOPED_TRACE(numel);
          expect_rank_order<float>(DType::kF32, 3, numel, starts, store, misaligned);
        }
      }
    }
  }
}

TEST(StoreFor, StreamsWhatNoCacheHolds) {
  EXPECT_EQ(store_for(1000), Store::kCached);
  EXPECT_EQ(store_for(std::int64_t{1} << 30), Store::kStreaming);
}

}  // namespace
}  // namespace tessera::comm

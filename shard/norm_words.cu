#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/cuda_launch.cuh"
#include "shard/norm_words_cuda.h"
#include "shard/tile.cuh"

namespace tessera::shard {

// [Note: exact sum of squares]
// The significand of an f32 is an integer below 2^24, its square one below 2^48, and the sum of all
// squares an integer of some 600 bits in units of the smallest, 2^-298. It is kept as words of 64
// bits of which word k counts 2^(8 k) such units: integers add in any order, so threads, blocks and
// ranks can. Only the end rounds, once.
//
// A thread takes 16 elements at a time and sums up, in registers, those with one of 16 exponents,
// up to at most 3 above the largest exponent that it found first: in practice nearly all. Its sum
// goes to the block's words when larger ones come, or much smaller ones, and at the end. Elements
// with lower exponents are summed in the same way apart, and go there at once. Where a sum begins
// is a multiple of 4 exponents, so of 8 bits.
namespace {

using Word = unsigned long long;

constexpr int kNumElements = 4 * kTileTurns;  // of a thread
constexpr unsigned kInfinity = 0x7F800000u;
constexpr unsigned kImplicitBit = 0x800000u;
constexpr unsigned kSpan = 16;   // exponents of a sum
constexpr unsigned kStep = 4;    // exponents between slots, where a sum can begin
constexpr unsigned kLowest = 5;  // above its begin: a sum whose elements are all below moves
constexpr int kDigitsOf32Bits = 4;
constexpr Word kHalf = (Word{1} << 24) - 1;
constexpr int kLowestBit = -298;
constexpr int kMaxBlocks = 528;  // four for each SM of an H100: few, as each adds to the same words

// Keeps what an infinity or NaN is told by: that nothing is larger.
__device__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// 2^n, or 0 where that has more than 32 bits. As nvcc makes more of it than the one instruction,
// and of the other below, both are spelled out.
__device__ unsigned power_of_2(unsigned n) {
#if defined(__CUDACC__)
  unsigned power;
  asm("shl.b32 %0, 1, %1;" : "=r"(power) : "r"(n));
  return power;
#else
  return n < 32 ? 1u << n : 0;
#endif
}

// a b + sum.
__device__ Word multiply_add(unsigned a, unsigned b, Word sum) {
#if defined(__CUDACC__)
  asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(sum) : "r"(a), "r"(b));
  return sum;
#else
  return static_cast<Word>(a) * b + sum;
#endif
}

__device__ void load(const float* shard, const Tile& tile, bool is_packed,
                     unsigned (&x)[kNumElements]) {
  if (is_packed && is_full(tile)) {
#pragma unroll
    for (int turn = 0; turn < kTileTurns; ++turn) {
      const auto quad = engine::Packed<float>::load(shard + quad_begin(tile, turn));
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * turn + j] = magnitude(quad.values[j]);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kNumElements; ++k) {
    const int i = k * kTileThreads + static_cast<int>(threadIdx.x);
    x[k] = i < tile.numel ? magnitude(shard[tile.begin + i]) : 0;
  }
}

// Adds value 2^(8 at) to the block's words, of which each holds 32 bits.
__device__ void add_word(unsigned* words, int at, unsigned value) {
  while (value != 0) {
    const unsigned before = atomicAdd(&words[at], value);
    value = before + value < before ? 1 : 0;  // the carry
    at += kDigitsOf32Bits;
  }
}

// low + 2^24 high, from bit 8 slot on.
struct Sum {
  unsigned slot = 0;
  Word low = 0, high = 0;

  // The first exponent.
  __device__ unsigned base() const { return 1 + kStep * slot; }

  // A slot in which an exponent is one of the 4 highest, or the lowest.
  __device__ void move_to(unsigned exponent) {
    constexpr unsigned kAbove = kSpan - kStep + 1;
    *this = {.slot = exponent < kAbove ? 0 : (exponent - kAbove) / kStep};
  }

  // Adds the squares of what lies in the span that begins with exponent `base`: for each x less
  // than 2^54 to `low` and to `high`.
  __device__ void add(const unsigned (&x)[kNumElements], unsigned base, unsigned implicit_bit) {
#pragma unroll
    for (int i = 0; i < kNumElements; ++i) {
      const unsigned place = power_of_2(2 * ((x[i] >> 23) - base));  // 0 elsewhere
      const unsigned significand = (x[i] & (kImplicitBit - 1)) | implicit_bit;
      const Word square = multiply_add(significand, significand, 0);
      low = multiply_add(static_cast<unsigned>(square & kHalf), place, low);
      high = multiply_add(static_cast<unsigned>(square >> 24), place, high);
    }
  }
  __device__ bool is_nearly_full() const { return (low | high) >> 62 != 0; }

  __device__ void add_to(unsigned* words) const {
    const Word bottom = low + (high << 24);
    const Word top = (high >> 40) + (bottom < low ? 1 : 0);
    const int at = static_cast<int>(slot);
    add_word(words, at, static_cast<unsigned>(bottom));
    add_word(words, at + kDigitsOf32Bits, static_cast<unsigned>(bottom >> 32));
    add_word(words, at + 2 * kDigitsOf32Bits, static_cast<unsigned>(top));
  }
};

// The squares of what is less than `end`.
__device__ void add_rest(unsigned* words, unsigned (&x)[kNumElements], unsigned end) {
  for (bool is_normal = true; is_normal;) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kNumElements; ++i) {
      if (x[i] >= end) x[i] = 0;
      largest = max(largest, x[i]);
    }
    if (largest == 0) return;
    // Subnormals have the place of exponent 1, and no implicit bit.
    is_normal = largest >= kImplicitBit;
    Sum rest;
    rest.move_to(largest >> 23);
    rest.add(x, is_normal ? rest.base() : 0, is_normal ? kImplicitBit : 0);
    rest.add_to(words);
    end = rest.base() << 23;
  }
}

__global__ void __launch_bounds__(kTileThreads, 4)
    add_squares_kernel(Word* words, const float* shard, const Tile* tiles, std::int64_t num_tiles,
                       bool is_packed, std::int64_t first_parameter) {
  __shared__ unsigned block_words[kNumNormDigits];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kNumNormDigits) block_words[thread] = 0;
  __syncthreads();
  Sum sum;
  for (std::int64_t t = blockIdx.x; t < num_tiles; t += gridDim.x) {
    const Tile tile = tiles[t];
    unsigned x[kNumElements];
    load(shard, tile, is_packed, x);
    unsigned largest = 0, smallest = kInfinity, end = kInfinity;
#pragma unroll
    for (int i = 0; i < kNumElements; ++i) {
      largest = max(largest, x[i]);
      smallest = min(smallest, x[i]);
    }
    if (largest >= kInfinity) {
      // Atomic maximum of a number that is largest for the first parameter.
      const auto index = static_cast<Word>(first_parameter + tile.parameter + 1);
      atomicMax(&words[kNumNormDigits],
                static_cast<Word>(std::numeric_limits<std::int64_t>::max()) - index);
      continue;
    }
    if (largest >= kImplicitBit) {
      const unsigned above = (largest >> 23) - sum.base();
      const bool is_far_below = above < kLowest && sum.slot != 0;
      if (above >= kSpan || is_far_below || sum.is_nearly_full()) {
        sum.add_to(block_words);
        sum.move_to(largest >> 23);
      }
      sum.add(x, sum.base(), kImplicitBit);
      end = sum.base() << 23;
    }
    if (smallest < end) add_rest(block_words, x, end);
  }
  sum.add_to(block_words);
  __syncthreads();
  if (thread < kNumNormDigits && block_words[thread] != 0) {
    atomicAdd(&words[thread], static_cast<Word>(block_words[thread]));
  }
}

// The sum of 2^(8 k) words[k] units, rounded once.
__device__ double rounded(const Word* words) {
  Word top = 0, carry = 0;  // `top`: the 64 bits that end with digit k
  bool is_more = false;     // something below
  int lowest = 0;           // the digit that the kept 64 bits begin with
  Word kept = 0;
  bool kept_is_more = false;
  for (int k = 0; k < kNumNormDigits + 8; ++k) {
    const Word sum = carry + (k < kNumNormDigits ? words[k] : 0);
    carry = sum >> 8;
    is_more = is_more || (top & 0xFF) != 0;
    top = top >> 8 | (sum & 0xFF) << 56;
    if ((sum & 0xFF) == 0) continue;
    kept = top;  // so far this is the highest digit
    kept_is_more = is_more;
    lowest = k - 7;
  }
  // At least 57 bits, so that a bit for what is below decides as that would.
  return ldexp(static_cast<double>(kept | (kept_is_more ? 1 : 0)), 8 * lowest + kLowestBit);
}

// One block, a thread a word.
__global__ void finish_norm_kernel(int* norm, const Word* words, std::int64_t num_parts,
                                   double mean_scale) {
  __shared__ Word sums[kNumNormDigits];
  const int thread = static_cast<int>(threadIdx.x);
  Word sum = 0;
  for (std::int64_t part = 0; part < num_parts; ++part) sum += words[part * kNumNormWords + thread];
  sums[thread] = sum;
  __syncthreads();
  if (thread != 0) return;
  Word fault = 0;
  for (std::int64_t part = 0; part < num_parts && fault == 0; ++part) {
    const Word word = words[part * kNumNormWords + kNumNormDigits];
    if (word != 0) fault = static_cast<Word>(std::numeric_limits<std::int64_t>::max()) - word;
  }
  norm[0] = __float_as_int(static_cast<float>(sqrt(rounded(sums)) * mean_scale));
  norm[1] = static_cast<int>(fault);
}

}  // namespace

void add_squares_cuda(const engine::Stream& stream, const engine::Tensor& words,
                      const engine::Tensor& shard, const engine::Tensor& tiles,
                      std::int64_t first_parameter) {
  engine::launch_kernel(stream, tile_shape(tiles, kMaxBlocks), add_squares_kernel,
                        reinterpret_cast<Word*>(words.raw()), shard.data<float>(), tiles_in(tiles),
                        tiles.dim(0), engine::are_packable(shard.data<float>()), first_parameter);
}

void finish_norm_cuda(const engine::Stream& stream, const engine::Tensor& norm,
                      const engine::Tensor& words, std::int64_t num_parts, double mean_scale) {
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(kNumNormDigits)},
                        finish_norm_kernel, norm.data<std::int32_t>(),
                        reinterpret_cast<const Word*>(words.raw()), num_parts, mean_scale);
}

}  // namespace tessera::shard

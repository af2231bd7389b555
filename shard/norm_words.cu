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
// A warp takes 16 elements a thread at a time. Its threads sum up in registers those with one of 32
// exponents, of which the highest is at most 3 above the largest element that the span was placed
// for: nearly always that is all, and takes no branch. Where it is not, or some are 0, the warp
// goes through its elements span by span, from the largest down. The threads' sums, which begin at
// the same slot, a multiple of 4 exponents and so of 8 bits, go to the block's words when the span
// moves, when one is nearly full, and at the end.
namespace {

using Word = unsigned long long;

constexpr int kNumElements = 4 * kTileTurns;  // of a thread
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
constexpr unsigned kInfinity = 0x7F800000u;
constexpr unsigned kImplicitBit = 0x800000u;
constexpr unsigned kSpan = 32;  // exponents of a sum
constexpr unsigned kStep = 4;   // exponents between slots, where a sum can begin
constexpr int kDigitsOf16Bits = 2;
constexpr int kLowestBit = -298;
// Few, as each adds to the same words, so that threads have registers for elements of two tiles.
constexpr int kNumBlocksOfSm = 3;
constexpr int kMaxBlocks = kNumBlocksOfSm * 132;  // of an H100

// Keeps what an infinity or NaN is told by: that nothing is larger.
__device__ unsigned magnitude(unsigned x) { return x & 0x7FFFFFFFu; }

// low + 2^33 middle + 2^64 high is the sum of a thread, in units of the square of the lowest place.
struct Sum {
  unsigned slot = 0;
  Word low = 0, middle = 0, high = 0;

  // The first exponent.
  __device__ unsigned base() const { return 1 + kStep * slot; }

  // To a slot, without elements, in which an exponent is one of the 4 highest, or the lowest.
  __device__ void move_to(unsigned exponent) {
    constexpr unsigned kAbove = kSpan - kStep + 1;
    *this = {.slot = exponent < kAbove ? 0 : (exponent - kAbove) / kStep};
  }

  // Adds (significand 2^(place mod 32))^2, of which `middle` gets less than 2^55.
  __device__ void add(unsigned significand, unsigned place) {
#if defined(__CUDACC__)
    // As nvcc makes more than these instructions of it, they are spelled out.
    asm("{\n\t"
        ".reg .u32 bottom, top, low0, low1, high0, high1;\n\t"
        "shf.l.wrap.b32 bottom, 0, %3, %4;\n\t"
        "shf.l.wrap.b32 top, %3, 0, %4;\n\t"
        "mov.b64 {low0, low1}, %0;\n\t"
        "mov.b64 {high0, high1}, %2;\n\t"
        "mad.lo.cc.u32 low0, bottom, bottom, low0;\n\t"
        "madc.hi.cc.u32 low1, bottom, bottom, low1;\n\t"
        "madc.lo.cc.u32 high0, top, top, high0;\n\t"
        "madc.hi.u32 high1, top, top, high1;\n\t"
        "mov.b64 %0, {low0, low1};\n\t"
        "mad.wide.u32 %1, bottom, top, %1;\n\t"
        "mov.b64 %2, {high0, high1};\n\t"
        "}"
        : "+l"(low), "+l"(middle), "+l"(high)
        : "r"(significand), "r"(place));
#else
    const Word shifted = static_cast<Word>(significand) << (place % kSpan);
    const Word bottom = shifted & 0xFFFFFFFFu, top = shifted >> 32;
    low += bottom * bottom;
    middle += bottom * top;
    high += top * top + (low < bottom * bottom ? 1 : 0);
#endif
  }

  // Adds the squares of `x`, if all lie in the span; if not, returns false, and the sum is wrong.
  __device__ bool try_add(const unsigned (&x)[kTileTurns][4]) {
    unsigned places = 0;
#pragma unroll
    for (int i = 0; i < kNumElements; ++i) {
      const unsigned bits = x[i / 4][i % 4];
      const unsigned place = (bits >> 23) - base();  // and the sign, on top of 8 bits
      places |= place;
      add((bits & (kImplicitBit - 1)) | kImplicitBit, place);
    }
    // Modulo 256 no other place looks like one of the span, unless that has exponents above 254.
    return (places & (256 - kSpan)) == 0 && base() < 256 - kSpan;
  }

  __device__ bool is_nearly_full() const { return (middle | high) >> 63 != 0; }

  // Adds what the threads of a warp have, all from the same slot on, to the block's words: by 16
  // bits, of each of which one lane adds the warp's sum.
  __device__ void add_to(Word* words) const {
    if (!__any_sync(kWholeWarp, (low | middle | high) != 0)) return;
    constexpr int kNumPieces = 8, kPiecesOfWord = 4;
    const Word bottom = low + (middle << 33);
    const Word top = high + (middle >> 31) + (bottom < low ? 1 : 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned mine = 0;
#pragma unroll
    for (int piece = 0; piece < kNumPieces; ++piece) {
      const Word word = piece < kPiecesOfWord ? bottom : top;
      const Word bits = word >> (16 * (piece % kPiecesOfWord)) & 0xFFFF;
      const unsigned total = __reduce_add_sync(kWholeWarp, static_cast<unsigned>(bits));
      if (lane == piece) mine = total;
    }
    if (mine != 0) atomicAdd(&words[static_cast<int>(slot) + kDigitsOf16Bits * lane], Word{mine});
  }
};

// The elements of a thread in one of the turns of a tile, 0 where the tile has none.
__device__ void load(const float* shard, const Tile& tile, bool is_packed, int turn,
                     unsigned (&x)[4]) {
  if (is_packed && is_full(tile)) {
    const auto quad = engine::Packed<float>::load(shard + quad_begin(tile, turn));
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __float_as_uint(quad.values[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = (4 * turn + j) * kTileThreads + static_cast<int>(threadIdx.x);
    x[j] = i < tile.numel ? __float_as_uint(shard[tile.begin + i]) : 0;
  }
}

__device__ void load(const float* shard, const Tile& tile, bool is_packed,
                     unsigned (&x)[kTileTurns][4]) {
#pragma unroll
  for (int turn = 0; turn < kTileTurns; ++turn) load(shard, tile, is_packed, turn, x[turn]);
}

// Adds the squares of a warp's elements in a tile, zeros and subnormals too, from the highest span
// down. `largest` is the largest magnitude of the warp, finite.
__device__ void add_any(Word* words, Sum& sum, unsigned largest, const float* shard,
                        const Tile& tile, bool is_packed) {
  for (unsigned end = kInfinity; largest != 0;) {  // elements from `end` on have been added
    const unsigned above = (largest >> 23) - sum.base();
    const bool is_far_below = above < kSpan / 2 && sum.slot != 0;
    if (above >= kSpan || is_far_below || __any_sync(kWholeWarp, sum.is_nearly_full())) {
      sum.add_to(words);
      sum.move_to(largest >> 23);
    }
    unsigned rest = 0;
    // Elements are loaded again, as what all 16 need at once is too much for registers.
#pragma unroll 1
    for (int turn = 0; turn < kTileTurns; ++turn) {
      unsigned x[4];
      load(shard, tile, is_packed, turn, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = magnitude(x[j]);
        const unsigned exponent = max(x[j] >> 23, 1u);  // subnormals have the place of exponent 1
        const unsigned significand = x[j] - ((exponent - 1) << 23);  // and no implicit bit
        const bool is_below = exponent < sum.base();
        sum.add(is_below || x[j] >= end ? 0 : significand, exponent - sum.base());
        if (is_below) rest = max(rest, x[j]);
      }
    }
    end = sum.base() << 23;
    largest = __reduce_max_sync(kWholeWarp, rest);
  }
}

__global__ void __launch_bounds__(kTileThreads, kNumBlocksOfSm)
    add_squares_kernel(Word* words, const float* shard, const Tile* tiles, std::int64_t num_tiles,
                       bool is_packed, std::int64_t first_parameter) {
  __shared__ Word block_words[kNumNormDigits];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kNumNormDigits) block_words[thread] = 0;
  __syncthreads();
  // Elements are loaded while those of the tile before are added, and tiles one earlier still.
  const std::int64_t step = gridDim.x;
  const auto tile_at = [=](std::int64_t t) { return t < num_tiles ? tiles[t] : Tile{}; };
  unsigned next[kTileTurns][4];
  load(shard, tile_at(blockIdx.x), is_packed, next);
  Tile next_tile = tile_at(blockIdx.x + step);
  Sum sum;
  for (std::int64_t t = blockIdx.x; t < num_tiles; t += step) {
    unsigned x[kTileTurns][4];
#pragma unroll
    for (int i = 0; i < kNumElements; ++i) x[i / 4][i % 4] = next[i / 4][i % 4];
    load(shard, next_tile, is_packed, next);
    next_tile = tile_at(t + 2 * step);
    Sum with = sum;
    const bool fits = with.try_add(x) && !sum.is_nearly_full();
    if (__all_sync(kWholeWarp, fits)) {
      sum = with;
      continue;
    }
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kNumElements; ++i) largest = max(largest, magnitude(x[i / 4][i % 4]));
    largest = __reduce_max_sync(kWholeWarp, largest);
    if (largest >= kInfinity) {
      // Atomic maximum of a number that is largest for the first parameter.
      const auto index = static_cast<Word>(first_parameter + tiles[t].parameter + 1);
      atomicMax(&words[kNumNormDigits],
                static_cast<Word>(std::numeric_limits<std::int64_t>::max()) - index);
    } else {
      add_any(block_words, sum, largest, shard, tile_at(t), is_packed);
    }
  }
  sum.add_to(block_words);
  __syncthreads();
  if (thread < kNumNormDigits && block_words[thread] != 0) {
    atomicAdd(&words[thread], block_words[thread]);
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

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/cuda_launch.cuh"
#include "shard/grad_norm_cuda.h"
#include "shard/segment_row.h"

namespace tessera::shard {

// [Note: sums by exponent]
// The significand of an f32 is an integer below 2^24, its square one below 2^48. For each of the
// 256 exponents the squares are summed as integers, the lower and the upper 24 bits apart, so that
// 2^40 of them fit 64 bits: one pass, exact, and the same whatever the order of threads, blocks and
// ranks. Only the last addition, of 256 sums in one fixed order, rounds. A thread sums on its own
// while neighbouring elements share an exponent; then it adds to the block's table, and the block
// at last to that of the device.
namespace {

using Word = unsigned long long;

constexpr int kNumExponents = 256;
constexpr int kNumThreads = 256;
constexpr Word kHalf = (Word{1} << 24) - 1;

__device__ void add_words(Word* words, unsigned exponent, Word low, Word high) {
  if (low != 0) atomicAdd(&words[2 * exponent], low);
  if (high != 0) atomicAdd(&words[2 * exponent + 1], high);
}

__global__ void add_squares_kernel(Word* words, const float* shard, const SegmentRow* table,
                                   std::int64_t first_parameter) {
  __shared__ Word block_words[2 * kNumExponents];
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kNumExponents; i += kNumThreads) {
    block_words[i] = 0;
  }
  __syncthreads();
  const SegmentRow segment = table[blockIdx.y];
  const float* g = shard + segment.begin;
  unsigned exponent = 0;
  Word low = 0, high = 0;
  bool is_finite = true;
  for (std::int64_t i = engine::stride_begin(); i < segment.numel; i += engine::stride_step()) {
    const auto bits = __float_as_uint(g[i]);
    const unsigned e = bits >> 23 & 0xFF;
    if (e == 0xFF) {
      is_finite = false;
      continue;
    }
    if (e != exponent) {
      add_words(block_words, exponent, low, high);
      exponent = e;
      low = high = 0;
    }
    const Word significand = (bits & 0x7FFFFF) | (e == 0 ? 0 : 0x800000);
    const Word square = significand * significand;
    low += square & kHalf;
    high += square >> 24;
  }
  add_words(block_words, exponent, low, high);
  if (!is_finite) {
    // Atomic maximum of a number that is largest for the first parameter.
    const auto index = static_cast<Word>(first_parameter + segment.parameter + 1);
    atomicMax(&words[2 * kNumExponents],
              static_cast<Word>(std::numeric_limits<std::int64_t>::max()) - index);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kNumExponents; i += kNumThreads) {
    if (block_words[i] != 0) atomicAdd(&words[i], block_words[i]);
  }
}

// One block, a thread an exponent.
__global__ void finish_norm_kernel(int* norm, const Word* words, std::int64_t num_parts,
                                   double mean_scale) {
  __shared__ double sums[kNumExponents];
  const int exponent = static_cast<int>(threadIdx.x);
  Word low = 0, high = 0;
  for (std::int64_t part = 0; part < num_parts; ++part) {
    low += words[part * kNumExponentWords + 2 * exponent];
    high += words[part * kNumExponentWords + 2 * exponent + 1];
  }
  const double sum = static_cast<double>(low) + 0x1p24 * static_cast<double>(high);
  sums[exponent] = ldexp(sum, 2 * ((exponent == 0 ? 1 : exponent) - 150));
  __syncthreads();
  if (exponent != 0) return;
  double total = 0;
  for (const double s : sums) total += s;
  Word fault = 0;
  for (std::int64_t part = 0; part < num_parts && fault == 0; ++part) {
    const Word word = words[part * kNumExponentWords + 2 * kNumExponents];
    if (word != 0) fault = static_cast<Word>(std::numeric_limits<std::int64_t>::max()) - word;
  }
  norm[0] = __float_as_int(static_cast<float>(sqrt(total) * mean_scale));
  norm[1] = static_cast<int>(fault);
}

}  // namespace

void add_squares_cuda(const engine::Stream& stream, const engine::Tensor& words,
                      const engine::Tensor& shard, const engine::Tensor& table,
                      std::int64_t first_parameter) {
  const auto* rows = reinterpret_cast<const SegmentRow*>(table.raw());
  engine::LaunchShape shape = engine::stride_shape((shard.numel() + 7) / 8, kNumThreads);
  for (std::int64_t row = 0; row < table.dim(0); row += kMaxSegmentRows) {
    shape.grid.y = static_cast<unsigned>(std::min(table.dim(0) - row, kMaxSegmentRows));
    engine::launch_kernel(stream, shape, add_squares_kernel, reinterpret_cast<Word*>(words.raw()),
                          shard.data<float>(), rows + row, first_parameter);
  }
}

void finish_norm_cuda(const engine::Stream& stream, const engine::Tensor& norm,
                      const engine::Tensor& words, std::int64_t num_parts, double mean_scale) {
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(kNumExponents)}, finish_norm_kernel,
                        norm.data<std::int32_t>(), reinterpret_cast<const Word*>(words.raw()),
                        num_parts, mean_scale);
}

}  // namespace tessera::shard

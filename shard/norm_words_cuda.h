// The kernels of norm_words.cc. See [Note: exact sum of squares] in norm_words.cu.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// i64 words of a partial sum: those of the sum itself, and the first parameter at fault.
inline constexpr int kNumNormDigits = 74;
inline constexpr std::int64_t kNumNormWords = kNumNormDigits + 1;

/// Adds the squares of a shard (f32) to `words`, which start as 0; `tiles` is Flat::tiles.
/// The last word becomes the least `first_parameter + parameter + 1` whose gradient is not finite,
/// as a distance from the largest i64; then the others mean nothing.
void add_squares_cuda(const engine::Stream& stream, const engine::Tensor& words,
                      const engine::Tensor& shard, const engine::Tensor& tiles,
                      std::int64_t first_parameter);

/// `words` of `num_parts` parts (num_parts * kNumNormWords) -> `norm` (2) i32: the bits of
/// sqrt(sum) * mean_scale as f32, and 0 or the word of the first part at fault: 1 + parameter.
void finish_norm_cuda(const engine::Stream& stream, const engine::Tensor& norm,
                      const engine::Tensor& words, std::int64_t num_parts, double mean_scale);

}  // namespace tessera::shard

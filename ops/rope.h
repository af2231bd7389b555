// Rotary position embedding (Su et al., "RoFormer", 2021) in the half-split pairing of GPT-NeoX and
// Llama: element i of a head turns with element i + D/2, by the angle t * base^(-2i/D).
#pragma once

#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

struct RopeOptions {
  std::int64_t head_size = 0;  ///< D; 0: the last dimension of x
  std::int64_t num_heads = 0;  ///< the first heads of each token are rotated, the rest is copied,
                               ///< e.g. H + KV of a packed q|k|v; 0: all
  double base = 10000;
  engine::Tensor positions = {};  ///< of the caller's: of documents that share a row and each begin
                                  ///< at 0, or of tokens that follow others whose keys are kept.
                                  ///< (T), of every sample, or (B, T); i32, data; undefined: 0..T-1
};

/// y like x with its heads rotated by their positions.
///   x (B, T, N*D) or (B, T, N, D), f32 or bf16 -> y like x. The gradient is the inverse rotation.
///   Saves a table of cosines and sines, f32, of a row (D) for each position. On the CPU given
///   positions 0..T-1 turn as those that it counts itself do to an f32's rounding; on a GPU to the
///   bit.
///   Throws InvalidArgument if D is odd or does not divide a token's elements, if there are fewer
///   than `num_heads` heads, or if x or positions have another rank, shape or dtype.
engine::Tensor rope(engine::Tape& tape, const engine::Tensor& x, const RopeOptions& options = {});

}  // namespace tessera::ops

// Rotary position embedding (Su et al., "RoFormer", 2021) in the half-split pairing of GPT-NeoX and
// Llama: element i of a head turns with element i + D/2, by the angle t * base^(-2i/D).
#pragma once

#include <cstdint>
#include <numbers>

#include "engine/tape.h"

namespace tessera::ops {

/// Makes heads turn slower than they were trained to, so that longer sequences fit. With the
/// defaults nothing is changed.
struct RopeScaling {
  double factor = 1;  ///< by which the slow pairs turn slower
  /// Positions that the model was trained with before: a pair that turns more than `high` times
  /// over these keeps its speed, one that turns less than `low` times is slow, and between the two
  /// it is in between (Llama 3.1). 0: all are slow, as if positions were divided by `factor`
  /// (Chen et al., arXiv:2306.15595).
  double original_positions = 0;
  double low = 1, high = 4;

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
  /// The angle from one position to the next, of a pair whose angle is `step` without scaling.
  constexpr double scaled(double step) const {
    if (original_positions == 0 || factor == 1) return step / factor;
    const double turns = original_positions * step / (2 * std::numbers::pi);
    if (turns > high) return step;
    if (turns < low) return step / factor;
    const double kept = (turns - low) / (high - low);
    return (1 - kept) * step / factor + kept * step;
  }
};

struct RopeOptions {
  std::int64_t head_size = 0;  ///< D; 0: the last dimension of x
  std::int64_t num_heads = 0;  ///< the first heads of each token are rotated, the rest is copied,
                               ///< e.g. H + KV of a packed q|k|v; 0: all
  double base = 10000;
  RopeScaling scaling = {};
  engine::Tensor positions = {};  ///< of the caller's: of documents that share a row and each begin
                                  ///< at 0, or of tokens that follow others whose keys are kept.
                                  ///< (T), of every sample, or (B, T); i32, data; undefined: 0..T-1
};

/// y like x with its heads rotated by their positions.
///   x (B, T, N*D) or (B, T, N, D), f32 or bf16 -> y like x. The gradient is the inverse rotation.
///   Saves a table of cosines and sines, f32, of a row (D) for each position. Given
///   positions that follow each other from 0 turn to the bit as those that it counts itself.
///   Throws InvalidArgument if D is odd or does not divide a token's elements, if there are fewer
///   than `num_heads` heads, if x or positions have another rank, shape or dtype, or for a scaling
///   by less than 1 or without 0 < low < high.
engine::Tensor rope(engine::Tape& tape, const engine::Tensor& x, const RopeOptions& options = {});

}  // namespace tessera::ops

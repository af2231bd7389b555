// Group normalisation (Wu and He, arXiv:1803.08494).
#pragma once

#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

/// y = (x - mean) / sqrt(var + eps) w + bias, where mean and variance are those of a group of
/// C / num_groups channels that are neighbours, over all their elements in one sample.
///   x (B, C, ...), not empty, w (C), bias (C) or null; f32 or bf16, all alike -> y like x. With
///   num_groups = C it is instance normalisation. Made of other ops, each of which rounds: saves x,
///   the normalised x, w repeated to the shape of x, a mean and a reciprocal standard deviation
///   (f32) for each group, and as many ones as a group has elements. Throws InvalidArgument if
///   num_groups does not divide C, or if shapes or dtypes do not fit.
engine::Tensor group_norm(engine::Tape& tape, const engine::Tensor& x, std::int64_t num_groups,
                          engine::Parameter& w, engine::Parameter* bias, float eps = 1e-5f);

}  // namespace tessera::ops

// The exact sum of the squares of a gradient, on a GPU: as words of an integer, which add in any
// order.
#pragma once

#include <cstdint>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/flat.h"

namespace tessera::shard {

/// Of one sum: i64, uninitialised. A sum begins with words of 0.
engine::Tensor make_norm_words(const engine::Memory& memory);
/// Adds the squares of `sum`, the whole Flat::grad_sum, to `words` as work of a CUDA stream.
/// `first_parameter`: how many trainable ones come before those of the flat.
void add_squares(const engine::Stream& stream, const engine::Tensor& words, const Flat& flat,
                 const engine::Tensor& sum, std::int64_t first_parameter);
/// What GradNorm::on_device() is, of the words of all parts, one after another: the root of
/// their sum, rounded once, times `mean_scale`. As work of a CUDA stream.
void finish_norm(const engine::Stream& stream, const engine::Tensor& norm,
                 const engine::Tensor& words, double mean_scale);

}  // namespace tessera::shard

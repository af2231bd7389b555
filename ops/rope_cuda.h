// Rotary embedding on CUDA streams; defined where CUDA is built. Private to ops.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tape.h"
#include "engine/tensor.h"
#include "ops/rope.h"

namespace tessera::ops {

/// x (batch, tokens, heads, head_size), of which the first `rotated` heads turn.
struct RopeShape {
  std::int64_t batch, tokens, heads, rotated, head_size;

  std::int64_t width() const { return heads * head_size; }
  double flops() const {
    return 3.0 * static_cast<double>(batch * tokens) * static_cast<double>(rotated * head_size);
  }
};

/// Fills the table (T, D) f32: row t holds D/2 cosines and D/2 sines of p times the scaled
/// base^(-2i/D), computed in double each by itself; p is `positions` (T) i32 at t, or t where these
/// are undefined.
void rope_table_cuda(const engine::Stream& stream, const engine::Tensor& table,
                     const engine::Tensor& positions, double base, const RopeScaling& scaling);

/// y = or += the rotation of x by `direction` (1 or -1) times the angles of the table.
void rope_rotate_cuda(const engine::Stream& stream, const engine::GradTarget& y,
                      const engine::Tensor& x, const engine::Tensor& table, const RopeShape& shape,
                      float direction);

}  // namespace tessera::ops

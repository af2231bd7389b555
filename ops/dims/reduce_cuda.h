// Reductions of (outer, n, inner) to (outer, inner), and their GPU side. Private to ops.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/dims/dim.h"

namespace tessera::ops {

/// out (outer, inner) = sum over dim.numel of x / divisor, or += ; f32 or bf16, any mix. Element r
/// of a sum goes to lane r modulo kLanes; then the lanes are folded, the upper half onto the lower.
struct DimSum {
  engine::GradTarget out;
  engine::Tensor x;
  Dim dim;
  float divisor = 1;
};

void launch_dim_sum(const engine::Stream& stream, std::string_view name, const DimSum& sum);

void dim_sum_cuda(const engine::Stream& stream, const DimSum& sum);
/// y and index (outer, inner) of the largest of x.
void dim_max_cuda(const engine::Stream& stream, const engine::Tensor& y,
                  const engine::Tensor& index, const engine::Tensor& x, const Dim& dim);
/// dx (outer, n, inner) = dy where `index` says, else 0; or += .
void dim_max_backward_cuda(const engine::Stream& stream, const engine::GradTarget& dx,
                           const engine::Tensor& dy, const engine::Tensor& index, const Dim& dim);

/// Whether `x`, at index `r`, is what max() takes before `y` at `s`: NaN before all, the larger,
/// the first of equals.
constexpr bool is_before(float x, std::int32_t r, float y, std::int32_t s) {
  const bool x_is_nan = x != x, y_is_nan = y != y;
  if (x_is_nan || y_is_nan) return x_is_nan && (!y_is_nan || r < s);
  return x > y || (x == y && r < s);
}

}  // namespace tessera::ops

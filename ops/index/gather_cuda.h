// ops::gather on CUDA streams; defined where CUDA is built. Private to ops.
#pragma once

#include "engine/stream.h"
#include "engine/tape.h"

namespace tessera::ops {

/// y[r] = x[r, index[r]]; NaN for an index outside the row.
void gather_forward_cuda(const engine::Stream& stream, const engine::Tensor& y,
                         const engine::Tensor& x, const engine::Tensor& index);

/// dx[r, index[r]] = or += dy[r], where the row has that index. The rest of dx is left alone, or
/// becomes 0 unless dx.accumulate.
void gather_backward_cuda(const engine::Stream& stream, const engine::GradTarget& dx,
                          const engine::Tensor& dy, const engine::Tensor& index);

}  // namespace tessera::ops

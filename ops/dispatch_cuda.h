// Dispatch and combine on CUDA streams; defined where CUDA is built, for float and BFloat16.
// Private to ops.
#pragma once

#include "engine/stream.h"
#include "ops/dispatch_rows.h"

namespace tessera::ops {

/// rows = or += x[n], times its gate unless `gates` is null.
template <class T>
void scatter_rows_cuda(const engine::Stream& stream, const ExpertRows<T>& rows, const T* x,
                       const float* gates);
/// y[n] = or += the sum of its rows, times their gates unless `gates` is null.
template <class T>
void gather_rows_cuda(const engine::Stream& stream, const ExpertRows<T>& rows, T* y,
                      const float* gates, bool accumulate);
/// dgates[n, j] = or += row . dy[n].
template <class T>
void dot_rows_cuda(const engine::Stream& stream, const ExpertRows<T>& rows, const T* dy,
                   float* dgates, bool accumulate);

}  // namespace tessera::ops

// Softmax on CUDA streams; defined where CUDA is built, for F = Softmax and F = LogSoftmax. Private
// to ops.
#pragma once

#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/softmax/softmax_functions.h"

namespace tessera::ops {

/// y = F of the rows of x, of one shape and dtype.
template <class F>
void softmax_forward_cuda(const engine::Stream& stream, const engine::Tensor& y,
                          const engine::Tensor& x);

/// dx = or += the gradient, of y and dy of its shape and dtype.
template <class F>
void softmax_backward_cuda(const engine::Stream& stream, const engine::GradTarget& dx,
                           const engine::Tensor& y, const engine::Tensor& dy);

}  // namespace tessera::ops

// What one normalisation reads and writes, and its CUDA entry points; these are defined where CUDA
// is built. Private to ops.
#pragma once

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "engine/tensor.h"

namespace tessera::ops {

/// y = norm(x), or sum = x + h and y = norm(sum). All (..., C) but w and bias (C), which are of one
/// dtype, f32 or bf16; statistics (...) f32.
struct NormForward {
  engine::Tensor x = {};
  engine::Tensor h = {}, sum = {};  ///< undefined without an addition
  engine::Tensor w = {};
  engine::Tensor bias = {};  ///< undefined: none
  engine::Tensor y = {};
  engine::Tensor mean = {};  ///< undefined: no mean is removed
  engine::Tensor rstd = {};
  float eps = 0;
};

/// Gradients of y = norm(x); those that nobody wants are undefined.
struct NormBackward {
  engine::GradTarget dx = {}, dw = {}, dbias = {};
  engine::Tensor residual = {};  ///< added to dx, the gradient of x from elsewhere; or undefined
  engine::Tensor dy = {}, x = {}, w = {};
  engine::Tensor mean = {}, rstd = {};  ///< as forward left them
};

template <class T>
T* data_or_null(const engine::Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

void normalize_forward_cuda(const engine::Stream& stream, const NormForward& n);
/// Returns the sums of the columns of dx, f32 (parts, C), if they are wanted, else undefined. Takes
/// an f32 workspace of up to 3 * 512 * C from `memory`, whose home is `stream`.
engine::Tensor normalize_backward_cuda(const engine::Stream& stream, const engine::Memory& memory,
                                       const NormBackward& n);

}  // namespace tessera::ops

// Pointwise ops on CUDA streams; defined where CUDA is built. Private to ops. Tensors are as the op
// has checked them; each element is computed in f32 and rounded once.
#pragma once

#include "engine/stream.h"
#include "engine/tape.h"
#include "engine/tensor.h"

namespace tessera::ops {

/// y = F::value(x), for the functions of ops/activation.h that have an op.
template <class F>
void unary_forward_cuda(const engine::Stream& stream, const engine::Tensor& y,
                        const engine::Tensor& x);
/// dx = or += dy * F::slope(x).
template <class F>
void unary_backward_cuda(const engine::Stream& stream, const engine::GradTarget& dx,
                         const engine::Tensor& dy, const engine::Tensor& x);

/// y = a + b.
void add_cuda(const engine::Stream& stream, const engine::Tensor& y, const engine::Tensor& a,
              const engine::Tensor& b);

/// y = silu(gate) up.
void swiglu_forward_cuda(const engine::Stream& stream, const engine::Tensor& y,
                         const engine::Tensor& gate, const engine::Tensor& up);
/// dgate = or += dy up silu'(gate).
void swiglu_backward_gate_cuda(const engine::Stream& stream, const engine::GradTarget& dgate,
                               const engine::Tensor& dy, const engine::Tensor& gate,
                               const engine::Tensor& up);
/// dup = or += dy silu(gate).
void swiglu_backward_up_cuda(const engine::Stream& stream, const engine::GradTarget& dup,
                             const engine::Tensor& dy, const engine::Tensor& gate);

}  // namespace tessera::ops

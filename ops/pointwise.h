// The skeleton of ops whose output elements depend on the input elements at the same index. Private
// to ops. bf16 elements are widened, computed in f32 and rounded once.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "engine/tape.h"
#include "ops/pointwise_cuda.h"

namespace tessera::ops {

/// out[i] = value(i), or += with `accumulate`.
template <class T, class F>
void write_elements(T* out, std::int64_t numel, bool accumulate, F value) {
  using engine::store_f32, engine::to_f32;
  if (accumulate) {
    for (std::int64_t i = 0; i < numel; ++i) store_f32(out[i], to_f32(out[i]) + value(i));
  } else {
    for (std::int64_t i = 0; i < numel; ++i) store_f32(out[i], value(i));
  }
}

/// What a pointwise op states about itself; FLOPs are per element.
struct PointwiseWork {
  std::string_view op;
  std::string_view forward;
  std::string_view backward;
  double forward_flops;
  double backward_flops;
};

/// Launches a backward that reads tensors of `bytes_read` bytes in all and writes `dx`.
template <class Cpu, class Cuda>
void launch_pointwise_backward(const engine::Tape& tape, const PointwiseWork& work,
                               const engine::GradTarget& dx, std::int64_t bytes_read, Cpu cpu,
                               Cuda cuda) {
  const auto numel = static_cast<double>(dx.dst.numel());
  const std::int64_t nbytes = dx.dst.nbytes();
  tape.stream().launch({.name = work.backward,
                        .flops = numel * (work.backward_flops + (dx.accumulate ? 1 : 0)),
                        .bytes_read = bytes_read + (dx.accumulate ? nbytes : 0),
                        .bytes_written = nbytes},
                       std::move(cpu), std::move(cuda));
}

/// y = F::value(x) elementwise, dx = dy * F::slope(x), for an F of ops/activation.h. Saves x.
template <class F>
engine::Tensor unary(engine::Tape& tape, const engine::Tensor& x, const PointwiseWork& work) {
  using engine::Tensor, engine::to_f32;
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), x.dtype(), work.op);
  tape.stream().launch(
      {.name = work.forward,
       .flops = static_cast<double>(x.numel()) * work.forward_flops,
       .bytes_read = x.nbytes(),
       .bytes_written = y.nbytes()},
      [=] {
        engine::dispatch_float(x.dtype(), work.op, [&](auto t) {
          using T = decltype(t);
          write_elements(y.data<T>(), y.numel(), false,
                         [x = x.data<T>()](std::int64_t i) { return F::value(to_f32(x[i])); });
        });
      },
      [=](const auto& stream) { unary_forward_cuda<F>(stream, y, x); });
  if (!wants_dx) return y;
  tape.record(work.op, y, [&tape, x, work](const Tensor& dy) {
    const engine::GradTarget dx = tape.grad_target(x);
    if (!dx) return;
    launch_pointwise_backward(
        tape, work, dx, x.nbytes() + dy.nbytes(),
        [=] {
          engine::dispatch_float(x.dtype(), work.op, [&](auto t) {
            using T = decltype(t);
            write_elements(dx.dst.data<T>(), x.numel(), dx.accumulate,
                           [x = x.data<T>(), dy = dy.data<T>()](std::int64_t i) {
                             return to_f32(dy[i]) * F::slope(to_f32(x[i]));
                           });
          });
        },
        [=](const auto& stream) { unary_backward_cuda<F>(stream, dx, dy, x); });
  });
  return y;
}

}  // namespace tessera::ops

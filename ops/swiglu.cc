#include "ops/swiglu.h"

#include "ops/activation.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

constexpr PointwiseWork kGateWork{"swiglu", "swiglu.forward", "swiglu.backward_gate",
                                  kSigmoidFlops + 2, kSigmoidFlops + 6};
constexpr PointwiseWork kUpWork{"swiglu", "swiglu.forward", "swiglu.backward_up", kSigmoidFlops + 2,
                                kSigmoidFlops + 2};

// dgate = dy up silu'(gate).
void backward_gate(const GradTarget& dgate, const Tensor& gate, const Tensor& up,
                   const Tensor& dy) {
  engine::dispatch_float(gate.dtype(), "swiglu", [&](auto t) {
    using T = decltype(t);
    write_elements(dgate.dst.data<T>(), gate.numel(), dgate.accumulate,
                   [gate = gate.data<T>(), up = up.data<T>(), dy = dy.data<T>()](std::int64_t i) {
                     return to_f32(dy[i]) * to_f32(up[i]) * Silu::slope(to_f32(gate[i]));
                   });
  });
}

// dup = dy silu(gate).
void backward_up(const GradTarget& dup, const Tensor& gate, const Tensor& dy) {
  engine::dispatch_float(gate.dtype(), "swiglu", [&](auto t) {
    using T = decltype(t);
    write_elements(dup.dst.data<T>(), gate.numel(), dup.accumulate,
                   [gate = gate.data<T>(), dy = dy.data<T>()](std::int64_t i) {
                     return to_f32(dy[i]) * Silu::value(to_f32(gate[i]));
                   });
  });
}

}  // namespace

Tensor swiglu(Tape& tape, const Tensor& gate, const Tensor& up) {
  engine::require(gate.shape() == up.shape() && gate.dtype() == up.dtype(),
                  "[swiglu] expected gate and up alike, got {} {} and {} {} ({})",
                  name_of(gate.dtype()), gate.shape().str(), name_of(up.dtype()), up.shape().str(),
                  gate.name());
  const bool wants_dgate = tape.needs_grad(gate), wants_dup = tape.needs_grad(up);
  const Tensor y = tape.empty(gate.shape(), gate.dtype(), "swiglu");
  tape.stream().launch(
      {.name = kGateWork.forward,
       .flops = static_cast<double>(y.numel()) * kGateWork.forward_flops,
       .bytes_read = gate.nbytes() + up.nbytes(),
       .bytes_written = y.nbytes()},
      [=] {
        engine::dispatch_float(gate.dtype(), "swiglu", [&](auto t) {
          using T = decltype(t);
          write_elements(y.data<T>(), y.numel(), false,
                         [gate = gate.data<T>(), up = up.data<T>()](std::int64_t i) {
                           return Silu::value(to_f32(gate[i])) * to_f32(up[i]);
                         });
        });
      },
      [=](const auto& stream) { swiglu_forward_cuda(stream, y, gate, up); });
  if (!wants_dgate && !wants_dup) return y;
  const Tensor saved = wants_dgate ? up : up.without_data();
  tape.record("swiglu", y, [&tape, gate, up = saved](const Tensor& dy) {
    // One after the other: gate and up may be the same tensor.
    if (const GradTarget dgate = tape.grad_target(gate)) {
      launch_pointwise_backward(
          tape, kGateWork, dgate, 3 * dy.nbytes(), [=] { backward_gate(dgate, gate, up, dy); },
          [=](const auto& stream) { swiglu_backward_gate_cuda(stream, dgate, dy, gate, up); });
    }
    if (const GradTarget dup = tape.grad_target(up)) {
      launch_pointwise_backward(
          tape, kUpWork, dup, 2 * dy.nbytes(), [=] { backward_up(dup, gate, dy); },
          [=](const auto& stream) { swiglu_backward_up_cuda(stream, dup, dy, gate); });
    }
  });
  return y;
}

}  // namespace tessera::ops

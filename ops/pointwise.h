// The skeleton of ops whose output elements depend on the input elements at the same index, for the
// ops here and for those of one's own. What an element is, is a function object:
//
//   struct Product {  // constexpr, so that nvcc compiles it for the GPU as well
//     static constexpr int kNumInputs = 2;
//     constexpr float operator()(float a, float b) const { return a * b; }
//   };
//   launch_pointwise(tape.stream(), work, Pointwise<Product>{{y}, {a, b}});
//
// In a build with CUDA the function's kernel is instantiated in a .cu file, by one line:
//
//   #include "ops/pointwise.cuh"
//   template void tessera::ops::pointwise_cuda(const engine::Stream&, const Pointwise<Product>&);
//
// Who has no nvcc includes ops/pointwise_without_nvcc.h in its place, for CPUs alone.
//
// examples/squared_relu.* is such an op. Elements are f32 or bf16, all of one dtype; bf16 is
// widened, computed in f32 and rounded once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "engine/tape.h"
#include "ops/column_sums.h"

namespace tessera::ops {

/// out = or += f(in[0], in[1], ...), element by element.
template <class F>
struct Pointwise {
  engine::GradTarget out;
  std::array<engine::Tensor, static_cast<std::size_t>(F::kNumInputs)> in;
  F f = {};
  engine::Tensor column_sums = {};  ///< of `out`, in parts; undefined: none. Of launch_gradient()
};

/// Functions that gradients are made with say `static constexpr bool kSumsColumns = true`: they
/// have a second kernel, which leaves the sums of columns that a bias wants.
template <class F>
concept SumsColumns = requires {
  requires F::kSumsColumns;
};

/// out[i] = value(i), or += with `accumulate`, on a CUDA stream; defined in pointwise.cuh.
template <class F>
void pointwise_cuda(const engine::Stream& stream, const Pointwise<F>& p);

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

namespace internal {

template <class T, class F, class... In>
void write_pointwise_elements(const engine::GradTarget& out, const F& f, const In*... in) {
  write_elements(out.dst.data<T>(), out.dst.numel(), out.accumulate,
                 [f, in...](std::int64_t i) { return f(engine::to_f32(in[i])...); });
}

template <class F, std::size_t... n>
void pointwise_cpu(const Pointwise<F>& p, std::index_sequence<n...>) {
  engine::dispatch_float(p.out.dst.dtype(), "pointwise", [&](auto t) {
    using T = decltype(t);
    write_pointwise_elements<T>(p.out, p.f, p.in[n].template data<T>()...);
  });
}

}  // namespace internal

/// out[i] = value(i), or += with `accumulate`, on the CPU.
template <class F>
void pointwise_cpu(const Pointwise<F>& p) {
  constexpr auto kNumInputs = static_cast<std::size_t>(F::kNumInputs);
  internal::pointwise_cpu(p, std::make_index_sequence<kNumInputs>());
}

/// Throws InvalidArgument, in the name of `op`, unless a and b have one shape and dtype.
inline void require_alike(std::string_view op, const engine::Tensor& a, const engine::Tensor& b) {
  engine::require(a.shape() == b.shape() && a.dtype() == b.dtype(),
                  "[{}] expected two tensors alike, got {} {} and {} {} ({}, {})", op,
                  name_of(a.dtype()), a.shape(), name_of(b.dtype()), b.shape(), a.name(), b.name());
}

/// What a pointwise kernel states: its name, and the FLOPs of an element.
struct PointwiseWork {
  std::string_view name;
  double flops;
};

/// Launches it. Throws InvalidArgument unless the tensors have one size and dtype, f32 or bf16.
template <class F>
void launch_pointwise(const engine::Stream& stream, const PointwiseWork& work, Pointwise<F> p) {
  const engine::Tensor& out = p.out.dst;
  engine::dispatch_float(out.dtype(), work.name, [](auto) {});
  std::int64_t nbytes_read = p.out.accumulate ? out.nbytes() : 0;
  for (const engine::Tensor& in : p.in) {
    engine::require(in.numel() == out.numel() && in.dtype() == out.dtype(),
                    "[{}] expected {} {}, got {} {} ({})", work.name, name_of(out.dtype()),
                    out.shape(), name_of(in.dtype()), in.shape(), in.name());
    nbytes_read += in.nbytes();
  }
  const bool sums = p.column_sums.defined();
  stream.launch(
      {.name = work.name,
       .flops = static_cast<double>(out.numel()) *
                (work.flops + (p.out.accumulate ? 1 : 0) + (sums ? 1 : 0)),
       .bytes_read = nbytes_read,
       .bytes_written = out.nbytes() + (sums ? p.column_sums.nbytes() : 0)},
      [p] { pointwise_cpu(p); }, [&](const auto& s) { pointwise_cuda(s, p); });
}

/// Launches the gradient of an input, p.out from tape.grad_target(): leaves the sums of its
/// columns, too, where they are wanted.
template <class F>
void launch_gradient(engine::Tape& tape, const PointwiseWork& work, Pointwise<F> p) {
  const engine::GradTarget dx = p.out;
  if (SumsColumns<F> && dx.wants_column_sums)
    p.column_sums = empty_part_sums(tape.memory(), dx.dst);
  const engine::Tensor sums = p.column_sums;
  launch_pointwise(tape.stream(), work, std::move(p));
  if (sums.defined()) tape.leave_column_sums(dx.dst, sums);
}

/// y = F::value(x), and dx = dy F::slope(x).
template <class F>
struct ValueOf {
  static constexpr int kNumInputs = 1;
  constexpr float operator()(float x) const { return F::value(x); }
};
template <class F>
struct SlopeOf {
  static constexpr int kNumInputs = 2;
  static constexpr bool kSumsColumns = true;
  constexpr float operator()(float dy, float x) const { return dy * F::slope(x); }
};

/// The part of unary() after the launch, for an x whose gradient is needed.
template <class F>
void record_unary(engine::Tape& tape, const engine::Tensor& x, const engine::Tensor& y,
                  std::string_view op, PointwiseWork backward) {
  tape.record(op, y, [&tape, x, backward](const engine::Tensor& dy) {
    if (const engine::GradTarget dx = tape.grad_target(x))
      launch_gradient(tape, backward, Pointwise<SlopeOf<F>>{dx, {dy, x}});
  });
}

/// An op of one number: y = F::value(x) elementwise, dx = dy F::slope(x). Saves x. Throws
/// InvalidArgument for another dtype than f32 and bf16.
template <class F>
engine::Tensor unary(engine::Tape& tape, const engine::Tensor& x, std::string_view op,
                     PointwiseWork forward, PointwiseWork backward) {
  using engine::Tensor;
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), x.dtype(), op);
  launch_pointwise(tape.stream(), forward, Pointwise<ValueOf<F>>{{y}, {x}});
  if (wants_dx) record_unary<F>(tape, x, y, op, backward);
  return y;
}

}  // namespace tessera::ops

#include "ops/sum.h"

#include <algorithm>
#include <array>

#include "ops/pointwise.h"
#include "ops/sum_cuda.h"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

namespace {

double to_double(double x) { return x; }
template <class T>
double to_double(T x) {
  return double{engine::to_f32(x)};
}

// In the order of sum_cuda.h.
template <class T>
double sum_lanes(const T* x, std::int64_t numel) {
  std::array<double, kSumLanes> lanes{};
  for (std::int64_t i = 0; i < numel; i += kSumLanes) {
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(numel - i, kSumLanes));
    for (std::size_t l = 0; l < count; ++l)
      lanes[l] += to_double(x[i + static_cast<std::int64_t>(l)]);
  }
  for (std::size_t half = kSumLanes / 2; half > 0; half /= 2)
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

template <class T>
float forward(const T* x, std::int64_t numel, double* chunk_sums) {
  const std::int64_t chunks = num_sum_chunks(numel);
  for (std::int64_t c = 0; c < chunks; ++c)
    chunk_sums[c] = sum_lanes(x + c * kSumChunk, std::min(numel - c * kSumChunk, kSumChunk));
  return static_cast<float>(sum_lanes(chunk_sums, chunks));
}

void launch_backward(const Tape& tape, const GradTarget& dx, const Tensor& dy) {
  tape.stream().launch(
      {.name = "sum.backward",
       .flops = dx.accumulate ? static_cast<double>(dx.dst.numel()) : 0,
       .bytes_read = dy.nbytes() + (dx.accumulate ? dx.dst.nbytes() : 0),
       .bytes_written = dx.dst.nbytes()},
      [=] {
        engine::dispatch_float(dx.dst.dtype(), "sum", [&](auto t) {
          write_elements(dx.dst.data<decltype(t)>(), dx.dst.numel(), dx.accumulate,
                         [d = *dy.data<float>()](std::int64_t) { return d; });
        });
      },
      [&](const auto& stream) { sum_backward_cuda(stream, dx, dy); });
}

}  // namespace

Tensor sum(Tape& tape, const Tensor& x) {
  engine::require(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16,
                  "[sum] expected f32 or bf16, got {} ({})", name_of(x.dtype()), x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty({}, DType::kF32, "sum");
  // Doubles, in memory of twice as many f32.
  const Tensor chunk_sums = Tensor::empty(tape.memory(), {num_sum_chunks(x.numel()), 2},
                                          DType::kF32, "sum.chunks", Category::kWorkspace);
  tape.stream().launch(
      {.name = "sum.forward",
       .flops = static_cast<double>(x.numel()),
       .bytes_read = x.nbytes(),
       .bytes_written = y.nbytes()},
      [=] {
        engine::dispatch_float(x.dtype(), "sum", [&](auto t) {
          *y.data<float>() = forward(x.data<decltype(t)>(), x.numel(),
                                     reinterpret_cast<double*>(chunk_sums.raw()));
        });
      },
      [&](const auto& stream) { sum_forward_cuda(stream, y, x, chunk_sums); });
  if (!wants_dx) return y;
  tape.record("sum", y, [&tape, x = x.without_data()](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) launch_backward(tape, dx, dy);
  });
  return y;
}

}  // namespace tessera::ops

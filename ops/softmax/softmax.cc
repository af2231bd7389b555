#include "ops/softmax/softmax.h"

#include <cmath>

#include "engine/elementwise.h"
#include "ops/block_sum.h"
#include "ops/host_workspace.h"
#include "ops/pointwise.h"
#include "ops/softmax/softmax_cuda.h"
#include "ops/softmax/softmax_functions.h"
#include "ops/softmax_rows.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

// `row` has room for a row.
template <class F, class T>
void forward_row(T* y, const T* x, std::int64_t cols, float* row) {
  engine::cast(row, x, cols);
  const float max = row_max(row, cols);
  if constexpr (F::kIsLog) {
    const auto norm = static_cast<float>(
        std::log(block_sum(cols, [=](std::int64_t i) { return exp(row[i] - max); })));
    write_elements(y, cols, /*accumulate=*/false,
                   [=](std::int64_t i) { return F::value(row[i] - max, norm); });
  } else {
    const auto norm = static_cast<float>(
        block_sum(cols, [=](std::int64_t i) { return row[i] = exp(row[i] - max); }));
    write_elements(y, cols, /*accumulate=*/false, [=](std::int64_t i) { return row[i] / norm; });
  }
}

template <class F, class T>
void backward_row(T* dx, bool accumulate, const T* y, const T* dy, std::int64_t cols) {
  const auto sum = static_cast<float>(
      block_sum(cols, [=](std::int64_t i) { return F::term(to_f32(dy[i]), to_f32(y[i])); }));
  write_elements(dx, cols, accumulate,
                 [=](std::int64_t i) { return F::slope(to_f32(dy[i]), to_f32(y[i]), sum); });
}

template <class F>
void launch_backward(const Tape& tape, const GradTarget& dx, const Tensor& y, const Tensor& dy) {
  tape.stream().launch(
      {.name = F::kBackward,
       .flops = static_cast<double>(y.numel()) * (F::kBackwardFlops + (dx.accumulate ? 1 : 0)),
       .bytes_read = y.nbytes() + dy.nbytes() + (dx.accumulate ? dx.dst.nbytes() : 0),
       .bytes_written = dx.dst.nbytes()},
      [=] {
        engine::dispatch_float(y.dtype(), F::kName, [&](auto t) {
          using T = decltype(t);
          const std::int64_t cols = y.dim(-1);
          for (std::int64_t i = 0; i < y.numel(); i += cols)
            backward_row<F>(dx.dst.data<T>() + i, dx.accumulate, y.data<T>() + i, dy.data<T>() + i,
                            cols);
        });
      },
      [&](const auto& stream) { softmax_backward_cuda<F>(stream, dx, y, dy); });
}

template <class F>
Tensor softmax_of(Tape& tape, const Tensor& x) {
  engine::require(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16,
                  "[{}] expected f32 or bf16, got {} ({})", F::kName, name_of(x.dtype()), x.name());
  engine::require(x.shape().rank() > 0 && x.dim(-1) > 0,
                  "[{}] expected (.., C) with C of at least 1, got {} ({})", F::kName, x.shape(),
                  x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(x.shape(), x.dtype(), F::kName);
  const Tensor row = host_workspace(tape, {x.dim(-1)}, "softmax.row");
  tape.stream().launch(
      {.name = F::kForward,
       .flops = static_cast<double>(x.numel()) * kSoftmaxFlops,
       .bytes_read = x.nbytes(),
       .bytes_written = y.nbytes()},
      [=] {
        engine::dispatch_float(x.dtype(), F::kName, [&](auto t) {
          using T = decltype(t);
          const std::int64_t cols = x.dim(-1);
          for (std::int64_t i = 0; i < x.numel(); i += cols)
            forward_row<F>(y.data<T>() + i, x.data<T>() + i, cols, row.data<float>());
        });
      },
      [&](const auto& stream) { softmax_forward_cuda<F>(stream, y, x); });
  if (!wants_dx) return y;
  tape.record(F::kName, y, [&tape, x = x.without_data(), y](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) launch_backward<F>(tape, dx, y, dy);
  });
  return y;
}

}  // namespace

Tensor softmax(Tape& tape, const Tensor& x) { return softmax_of<Softmax>(tape, x); }

Tensor log_softmax(Tape& tape, const Tensor& x) { return softmax_of<LogSoftmax>(tape, x); }

}  // namespace tessera::ops

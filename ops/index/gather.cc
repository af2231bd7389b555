#include "ops/index/gather.h"

#include <string_view>

#include "engine/elementwise.h"
#include "ops/embedding_rows.h"
#include "ops/index/gather_cuda.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::require;
using engine::store_f32;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

constexpr RowLookup kGather{"gather", "an index", "gather.forward", "gather.backward"};
constexpr RowLookup kRows{"rows", "an index", "rows.forward", "rows.backward"};

void check_dtypes(std::string_view op, const Tensor& x, const Tensor& index) {
  require(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16,
          "[{}] expected f32 or bf16, got {} ({})", op, name_of(x.dtype()), x.name());
  require(index.dtype() == DType::kI32, "[{}] expected an index i32, got {} ({})", op,
          name_of(index.dtype()), index.name());
}

template <class T>
void backward(T* dx, bool accumulate, std::int64_t cols, const T* dy, const std::int32_t* index,
              std::int64_t num_rows) {
  for (std::int64_t r = 0; r < num_rows; ++r) {
    T& d = dx[r * cols + index[r]];
    store_f32(d, accumulate ? to_f32(d) + to_f32(dy[r]) : to_f32(dy[r]));
  }
}

void launch_backward(const Tape& tape, const GradTarget& dx, const Tensor& dy,
                     const Tensor& index) {
  tape.stream().launch(
      {.name = kGather.backward,
       .flops = dx.accumulate ? static_cast<double>(dy.numel()) : 0,
       .bytes_read = index.nbytes() + dy.nbytes() + (dx.accumulate ? dy.nbytes() : 0),
       .bytes_written = dx.accumulate ? dy.nbytes() : dx.dst.nbytes()},
      [=] {
        if (!dx.accumulate) engine::fill_zero(dx.dst);
        engine::dispatch_float(dy.dtype(), "gather", [&](auto t) {
          using T = decltype(t);
          backward(dx.dst.data<T>(), dx.accumulate, dx.dst.dim(-1), dy.data<T>(),
                   index.data<std::int32_t>(), dy.numel());
        });
      },
      [&](const auto& stream) { gather_backward_cuda(stream, dx, dy, index); });
}

}  // namespace

Tensor gather(Tape& tape, const Tensor& x, const Tensor& index) {
  check_dtypes("gather", x, index);
  require(x.shape().rank() > 0 && index.shape() == x.shape().drop_last(),
          "[gather] expected an index for each row of {}, got {} ({}, {})", x.shape(),
          index.shape(), x.name(), index.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(index.shape(), x.dtype(), "gather");
  tape.stream().launch(
      {.name = kGather.forward,
       .bytes_read = index.nbytes() + y.nbytes(),
       .bytes_written = y.nbytes()},
      [=] {
        const std::int64_t cols = x.dim(-1);
        check_numbers(kGather, index, cols);
        engine::dispatch_float(x.dtype(), "gather", [&](auto t) {
          using T = decltype(t);
          const T* const from = x.data<T>();
          const std::int32_t* const chosen = index.data<std::int32_t>();
          T* const to = y.data<T>();
          for (std::int64_t r = 0; r < y.numel(); ++r) to[r] = from[r * cols + chosen[r]];
        });
      },
      [&](const auto& stream) { gather_forward_cuda(stream, y, x, index); });
  if (!wants_dx) return y;
  tape.record("gather", y, [&tape, x = x.without_data(), index](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) launch_backward(tape, dx, dy, index);
  });
  return y;
}

Tensor rows(Tape& tape, const Tensor& x, const Tensor& index) {
  check_dtypes("rows", x, index);
  require(x.shape().rank() == 2, "[rows] expected (N, C), got {} ({})", x.shape(), x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = look_up_rows(tape, kRows, index, x);
  if (!wants_dx) return y;
  tape.record("rows", y, [&tape, x = x.without_data(), index](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x)) launch_row_scatter(tape, kRows, dx, dy, index);
  });
  return y;
}

}  // namespace tessera::ops

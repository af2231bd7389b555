#include "ops/dims/reduce.h"

#include <algorithm>
#include <limits>

#include "ops/dims/reduce_cuda.h"
#include "ops/dims/strided_copy.h"
#include "ops/lanes.h"
#include "ops/pointwise.h"

namespace tessera::ops {

using engine::GradTarget;
using engine::Shape;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

constexpr std::int64_t kMaxCols = 64;  // of a block, whose lanes fit in the first cache

// sums[c] = that of column c of x (n, inner), for `cols` neighbours: lane_sum() of each.
template <class T>
void sum_columns(float* sums, const T* x, std::int64_t n, std::int64_t inner, std::int64_t cols) {
  float lanes[kLanes][kMaxCols];
  for (auto& lane : lanes) std::fill_n(lane, cols, 0.0f);
  for (std::int64_t r = 0; r < n; ++r) {
    float* lane = lanes[r % kLanes];
    for (std::int64_t c = 0; c < cols; ++c) lane[c] += to_f32(x[r * inner + c]);
  }
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t l = 0; l < half; ++l)
      for (std::int64_t c = 0; c < cols; ++c) lanes[l][c] += lanes[l + half][c];
  }
  std::copy_n(lanes[0], cols, sums);
}

template <class Out, class T>
void sum_cpu(Out* out, const T* x, const Dim& dim, float divisor, bool accumulate) {
  float sums[kMaxCols];
  for (std::int64_t o = 0; o < dim.outer; ++o) {
    for (std::int64_t c = 0; c < dim.inner; c += kMaxCols) {
      const std::int64_t cols = std::min(kMaxCols, dim.inner - c);
      const T* const from = x + o * dim.numel * dim.inner + c;
      if (dim.inner == 1) {
        sums[0] = lane_sum(dim.numel, [from](std::int64_t r) { return to_f32(from[r]); });
      } else {
        sum_columns(sums, from, dim.numel, dim.inner, cols);
      }
      write_elements(out + o * dim.inner + c, cols, accumulate,
                     [&](std::int64_t i) { return sums[i] / divisor; });
    }
  }
}

// `y` and `index` hold the largest so far.
template <class T>
void max_cpu(T* y, std::int32_t* index, const T* x, const Dim& dim) {
  for (std::int64_t o = 0; o < dim.outer; ++o, y += dim.inner, index += dim.inner) {
    for (std::int32_t r = 0; r < dim.numel; ++r, x += dim.inner) {
      for (std::int64_t c = 0; c < dim.inner; ++c) {
        if (r > 0 && !is_before(to_f32(x[c]), r, to_f32(y[c]), index[c])) continue;
        y[c] = x[c];
        index[c] = r;
      }
    }
  }
}

template <class T>
void max_backward_cpu(T* dx, bool accumulate, const T* dy, const std::int32_t* index,
                      const Dim& dim) {
  if (!accumulate) std::fill_n(dx, dim.outer * dim.numel * dim.inner, T{});
  for (std::int64_t q = 0; q < dim.outer * dim.inner; ++q) {
    T* const to = dx + (q / dim.inner * dim.numel + index[q]) * dim.inner + q % dim.inner;
    write_elements(to, 1, accumulate, [&](std::int64_t) { return to_f32(dy[q]); });
  }
}

Shape without(const Shape& shape, int index) {
  std::vector<std::int64_t> dims(shape.dims().begin(), shape.dims().end());
  dims.erase(dims.begin() + index);
  return Shape(std::span<const std::int64_t>(dims));
}

// dx[.., r, ..] = dy[.., ..] / divisor for all r.
void launch_repeat(const Stream& stream, std::string_view name, const GradTarget& dx,
                   const Tensor& dy, const Dim& dim, float divisor) {
  launch_strided_copy(stream, name,
                      {.rank = 3,
                       .dims = {dim.outer, dim.numel, dim.inner},
                       .to = {dx.dst, 0, {dim.numel * dim.inner, dim.inner, 1}},
                       .from = {dy, 0, {dim.inner, 0, 1}},
                       .divisor = divisor,
                       .accumulate = dx.accumulate});
}

// `forward` and `backward` are names that outlive the tape.
Tensor sum_over(Tape& tape, const Tensor& x, const Dim& dim, float divisor, std::string_view op,
                std::string_view forward, std::string_view backward) {
  engine::dispatch_float(x.dtype(), op, [](auto) {});
  const bool wants_dx = tape.needs_grad(x);
  const Tensor y = tape.empty(without(x.shape(), dim.index), x.dtype(), op);
  launch_dim_sum(tape.stream(), forward, {{y}, x, dim, divisor});
  if (!wants_dx) return y;
  tape.record(op, y, [&tape, x = x.without_data(), dim, divisor, backward](const Tensor& dy) {
    if (const GradTarget dx = tape.grad_target(x))
      launch_repeat(tape.stream(), backward, dx, dy, dim, divisor);
  });
  return y;
}

}  // namespace

void launch_dim_sum(const Stream& stream, std::string_view name, const DimSum& sum) {
  const Tensor& out = sum.out.dst;
  stream.launch(
      {.name = name,
       .flops = static_cast<double>(sum.x.numel()) +
                static_cast<double>(out.numel()) *
                    ((sum.divisor == 1 ? 0 : 1) + (sum.out.accumulate ? 1 : 0)),
       .bytes_read = sum.x.nbytes() + (sum.out.accumulate ? out.nbytes() : 0),
       .bytes_written = out.nbytes()},
      [sum, out] {
        engine::dispatch_float(out.dtype(), "sum", [&](auto to) {
          engine::dispatch_float(sum.x.dtype(), "sum", [&](auto from) {
            using T = decltype(from);
            sum_cpu(out.data<decltype(to)>(), static_cast<const T*>(sum.x.data<T>()), sum.dim,
                    sum.divisor, sum.out.accumulate);
          });
        });
      },
      [&](const auto& s) { dim_sum_cuda(s, sum); });
}

Tensor sum(Tape& tape, const Tensor& x, int dim) {
  return sum_over(tape, x, dim_of(x, dim, "sum"), 1, "sum", "sum.forward", "sum.backward");
}

Tensor mean(Tape& tape, const Tensor& x, int dim) {
  const Dim d = dim_of(x, dim, "mean");
  return sum_over(tape, x, d, static_cast<float>(d.numel), "mean", "mean.forward", "mean.backward");
}

MaxOf max(Tape& tape, const Tensor& x, int dim) {
  const Dim d = dim_of(x, dim, "max");
  engine::dispatch_float(x.dtype(), "max", [](auto) {});
  engine::require(d.numel > 0 && d.numel <= std::numeric_limits<std::int32_t>::max(),
                  "[max] expected 1 to 2^31 - 1 elements in dimension {} of {}, got {} ({})",
                  d.index, x.shape(), d.numel, x.name());
  const bool wants_dx = tape.needs_grad(x);
  const Shape shape = without(x.shape(), d.index);
  const Tensor y = tape.empty(shape, x.dtype(), "max");
  const Tensor index = tape.empty(shape, engine::DType::kI32, "max.index");
  tape.stream().launch(
      {.name = "max.forward",
       .flops = static_cast<double>(x.numel()),
       .bytes_read = x.nbytes(),
       .bytes_written = y.nbytes() + index.nbytes()},
      [=] {
        engine::dispatch_float(x.dtype(), "max", [&](auto t) {
          using T = decltype(t);
          max_cpu(y.data<T>(), index.data<std::int32_t>(), static_cast<const T*>(x.data<T>()), d);
        });
      },
      [&](const auto& stream) { dim_max_cuda(stream, y, index, x, d); });
  if (!wants_dx) return {y, index};
  tape.record("max", y, [&tape, x = x.without_data(), index, d](const Tensor& dy) {
    const GradTarget dx = tape.grad_target(x);
    if (!dx) return;
    tape.stream().launch(
        {.name = "max.backward",
         .flops = dx.accumulate ? static_cast<double>(dy.numel()) : 0,
         .bytes_read = dy.nbytes() + index.nbytes() + (dx.accumulate ? dx.dst.nbytes() : 0),
         .bytes_written = dx.dst.nbytes()},
        [=] {
          engine::dispatch_float(dy.dtype(), "max", [&](auto t) {
            using T = decltype(t);
            max_backward_cpu(dx.dst.data<T>(), dx.accumulate, static_cast<const T*>(dy.data<T>()),
                             index.data<std::int32_t>(), d);
          });
        },
        [&](const auto& stream) { dim_max_backward_cuda(stream, dx, dy, index, d); });
  });
  return {y, index};
}

}  // namespace tessera::ops

#include "ops/linear.h"

#include <algorithm>
#include <utility>

#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_cuda.h"
#include "ops/column_sums.h"
#include "ops/gelu.h"
#include "ops/gelu_parts.h"
#include "ops/host_workspace.h"

namespace tessera::ops {

using engine::DeviceMatrix;
using engine::dispatch_float;
using engine::gemm_flops;
using engine::GradTarget;
using engine::MatrixView;
using engine::Parameter;
using engine::Product;
using engine::Products;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;
using engine::Work;

namespace {

// W as (I, O), however it is stored.
template <class T>
MatrixView<T> weight_matrix(const Tensor& w, WeightLayout layout) {
  const MatrixView<T> stored = matrix<T>(w, w.dim(0), w.dim(1));
  return layout == WeightLayout::kInOut ? stored : stored.t();
}

// Without CUDA nothing instantiates its callers.
[[maybe_unused]] DeviceMatrix device_weight_matrix(const Tensor& w, WeightLayout layout) {
  const DeviceMatrix stored = device_matrix(w, w.dim(0), w.dim(1));
  return layout == WeightLayout::kInOut ? stored : stored.t();
}

// On the CPU `with_product` calls its argument with the product.
template <class WithProduct, class Cuda>
void launch_product(const Tape& tape, Work work, WithProduct with_product, Cuda cuda) {
  auto& products = tape.stream().state<Products>();
  Tensor scratch;
  if (!tape.stream().device().is_cuda()) {
    with_product([&](const auto& product) {
      scratch = gemm_scratch(tape.memory(), product.scratch_nbytes(products));
    });
  }
  tape.stream().launch(
      std::move(work),
      [=, &products] {
        with_product([&](const auto& product) { product.run(products, scratch); });
      },
      cuda);
}

// sums[j] = dy[0][j] + dy[1][j] + ..., eight rows at a time.
template <class T>
void sum_rows(float* sums, const T* dy, std::int64_t rows, std::int64_t cols) {
  std::fill(sums, sums + cols, 0.0f);
  std::int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    const T* d = dy + r * cols;
    for (std::int64_t j = 0; j < cols; ++j) {
      const auto at = [=](std::int64_t k) { return to_f32(d[k * cols + j]); };
      sums[j] += ((at(0) + at(1)) + (at(2) + at(3))) + ((at(4) + at(5)) + (at(6) + at(7)));
    }
  }
  for (; r < rows; ++r) engine::add(sums, dy + r * cols, cols);
}

void backward_x(const Tape& tape, const GradTarget& dx, const Parameter& p, const Tensor& dy,
                WeightLayout layout) {
  const Tensor& w = p.value;
  const std::int64_t rows = dy.shape().rows(), in = dx.dst.dim(-1), out = dy.dim(-1);
  launch_product(
      tape,
      {.name = "linear.backward_x",
       .flops = gemm_flops(rows, in, out),
       .bytes_read = dy.nbytes() + w.nbytes() + (dx.accumulate ? dx.dst.nbytes() : 0),
       .bytes_written = dx.dst.nbytes(),
       .detail = p.name},
      [=](auto fn) {
        dispatch_float(dy.dtype(), "linear", [&](auto t) {
          using T = decltype(t);
          fn(Product<T, T, T>{matrix<const T>(dy, rows, out), weight_matrix<const T>(w, layout).t(),
                              matrix<T>(dx.dst, rows, in), dx.accumulate});
        });
      },
      [&](const auto& stream) {
        gemm_cuda(stream, tape.memory(),
                  {.a = device_matrix(dy, rows, out),
                   .b = device_weight_matrix(w, layout).t(),
                   .c = device_matrix(dx.dst, rows, in),
                   .accumulate = dx.accumulate});
      });
}

// The gradient of h, of which the layer's input is GELU. On a GPU.
void backward_h(Tape& tape, const GradTarget& dh, const Parameter& p, const Tensor& h,
                const Tensor& dy, WeightLayout layout) {
  engine::require(!dh.accumulate, "[gelu_mlp] expected one gradient of {}, got another", h.name());
  const std::int64_t rows = dy.shape().rows(), in = h.dim(-1), out = dy.dim(-1);
  const Tensor sums = dh.wants_column_sums ? empty_part_sums(tape.memory(), dh.dst) : Tensor();
  tape.stream().launch(
      {.name = "linear_gelu.backward_x",
       .flops = gemm_flops(rows, in, out) +
                static_cast<double>(h.numel()) * (kTanhGeluSlopeFlops + (sums.defined() ? 1 : 0)),
       .bytes_read = dy.nbytes() + p.value.nbytes() + h.nbytes(),
       .bytes_written = dh.dst.nbytes() + (sums.defined() ? sums.nbytes() : 0),
       .detail = p.name},
      [] {},
      [&](const auto& stream) {
        engine::GeluSlope slope{.at = device_matrix(h, rows, in),
                                .column_sums = {},
                                .finish = finish_tanh_gelu_slope_cuda};
        if (sums.defined()) slope.column_sums = device_matrix(sums, sums.dim(0), in);
        gemm_cuda(stream, tape.memory(),
                  {.a = device_matrix(dy, rows, out),
                   .b = device_weight_matrix(p.value, layout).t(),
                   .c = device_matrix(dh.dst, rows, in),
                   .slope = slope});
      });
  if (sums.defined()) tape.leave_column_sums(dh.dst, sums);
}

void backward_w(const Tape& tape, const GradTarget& dw, const Parameter& p, const Tensor& x,
                const Tensor& dy, WeightLayout layout) {
  const std::int64_t rows = dy.shape().rows(), in = x.dim(-1), out = dy.dim(-1);
  launch_product(
      tape,
      {.name = "linear.backward_w",
       .flops = gemm_flops(in, out, rows),
       .bytes_read = dy.nbytes() + x.nbytes() + (dw.accumulate ? dw.dst.nbytes() : 0),
       .bytes_written = dw.dst.nbytes(),
       .detail = p.name},
      [=](auto fn) {
        dispatch_float(dy.dtype(), "linear", [&](auto t) {
          using T = decltype(t);
          dispatch_float(dw.dst.dtype(), "linear", [&](auto g) {
            using G = decltype(g);
            fn(Product<T, T, G>{matrix<const T>(x, rows, in).t(), matrix<const T>(dy, rows, out),
                                weight_matrix<G>(dw.dst, layout), dw.accumulate});
          });
        });
      },
      [&](const auto& stream) {
        gemm_cuda(stream, tape.memory(),
                  {.a = device_matrix(x, rows, in).t(),
                   .b = device_matrix(dy, rows, out),
                   .c = device_weight_matrix(dw.dst, layout),
                   .accumulate = dw.accumulate});
      });
}

void backward_bias(const Tape& tape, const GradTarget& db, const Parameter& p, const Tensor& dy) {
  const Tensor sums = host_workspace(tape, db.dst.shape(), "linear.bias_sums");
  const Tensor parts = tape.column_sums(dy);
  const Tensor& summed = parts.defined() ? parts : dy;
  tape.stream().launch(
      {.name = "linear.backward_bias",
       .flops = static_cast<double>(summed.numel()),
       .bytes_read = summed.nbytes() + (db.accumulate ? db.dst.nbytes() : 0),
       .bytes_written = db.dst.nbytes(),
       .detail = p.name},
      [=] {
        dispatch_float(dy.dtype(), "linear", [&](auto t) {
          sum_rows(sums.data<float>(), dy.data<decltype(t)>(), dy.shape().rows(), dy.dim(-1));
        });
        engine::assign_or_add(db.dst, sums, db.accumulate);
      },
      [&](const auto& stream) {
        if (parts.defined()) return sum_parts_cuda(stream, db, parts);
        column_sums_cuda(stream, tape.memory(), db, dy);
      });
}

// The layer, and on a GPU with `gelu` GELU (tanh) of it as well. With `h`, on a GPU: x is GELU of
// that, which takes the gradient.
Tensor linear(Tape& tape, const Tensor& x, Parameter& w, Parameter* bias, WeightLayout layout,
              Tensor* gelu, const Tensor& h = {}) {
  const Tensor value = tape.use(w);
  const Tensor bias_value = bias != nullptr ? tape.use(*bias) : Tensor();
  engine::require(value.shape().rank() == 2,
                  "[linear] expected a weight of two dimensions, got {} ({})", value.shape(),
                  w.name);
  const bool in_out = layout == WeightLayout::kInOut;
  const std::int64_t in = value.dim(in_out ? 0 : 1), out = value.dim(in_out ? 1 : 0);
  engine::require(x.shape().rank() > 0 && x.dim(-1) == in && x.dtype() == value.dtype(),
                  "[linear] expected x (..., {}) {}, got {} {} ({} by {})", in,
                  name_of(value.dtype()), x.shape(), name_of(x.dtype()), x.name(), w.name);
  if (bias != nullptr) {
    engine::require(bias_value.shape() == engine::Shape{out} && bias_value.dtype() == x.dtype(),
                    "[linear] expected a bias ({}) {}, got {} {} ({})", out, name_of(x.dtype()),
                    bias_value.shape(), name_of(bias_value.dtype()), bias->name);
  }
  const bool wants_dx = tape.needs_grad(h.defined() ? h : x), wants_dw = tape.needs_grad(w);
  const bool wants_dbias = bias != nullptr && tape.needs_grad(*bias);
  const Tensor y = tape.empty(x.shape().with_last(out), x.dtype(), "linear");
  if (gelu != nullptr) *gelu = tape.empty(y.shape(), y.dtype(), "gelu");
  const auto numel = static_cast<double>(y.numel());
  launch_product(
      tape,
      {.name = gelu != nullptr ? "linear_gelu.forward" : "linear.forward",
       .flops = gemm_flops(y.shape().rows(), out, in) + (bias != nullptr ? numel : 0) +
                (gelu != nullptr ? numel * kTanhGeluFlops : 0),
       .bytes_read = x.nbytes() + value.nbytes() + (bias != nullptr ? bias_value.nbytes() : 0),
       .bytes_written = (gelu != nullptr ? 2 : 1) * y.nbytes(),
       .detail = w.name},
      [=](auto fn) {
        dispatch_float(x.dtype(), "linear", [&](auto t) {
          using T = decltype(t);
          fn(Product<T, T, T>{matrix<const T>(x, y.shape().rows(), in),
                              weight_matrix<const T>(value, layout),
                              matrix<T>(y, y.shape().rows(), out), /*accumulate=*/false,
                              bias_value.defined() ? bias_value.data<T>() : nullptr});
        });
      },
      [&](const auto& stream) {
        engine::DeviceProduct product{.a = device_matrix(x, x.shape().rows(), in),
                                      .b = device_weight_matrix(value, layout),
                                      .c = device_matrix(y, x.shape().rows(), out),
                                      .bias = bias != nullptr ? bias_value.raw() : nullptr};
        if (gelu != nullptr) {
          product.before_gelu = std::exchange(product.c, device_matrix(*gelu, product.c.rows, out));
          product.gelu = tanh_gelu_cuda;
        }
        gemm_cuda(stream, tape.memory(), product);
      });
  if (bias != nullptr && bias->trainable && !tape.is_frozen()) tape.want_column_sums(y);
  if (!wants_dx && !wants_dw && !wants_dbias) return y;
  const Tensor saved = wants_dw ? x : x.without_data(), saved_h = wants_dx ? h : Tensor();
  tape.record("linear", y, [&tape, x = saved, h = saved_h, &w, bias, layout](const Tensor& dy) {
    if (h.defined()) {
      if (const GradTarget dh = tape.grad_target(h)) backward_h(tape, dh, w, h, dy, layout);
    } else if (const GradTarget dx = tape.grad_target(x)) {
      backward_x(tape, dx, w, dy, layout);
    }
    if (const GradTarget dw = tape.grad_target(w)) backward_w(tape, dw, w, x, dy, layout);
    if (bias == nullptr) return;
    if (const GradTarget db = tape.grad_target(*bias)) backward_bias(tape, db, *bias, dy);
  });
  return y;
}

}  // namespace

Tensor linear(Tape& tape, const Tensor& x, Parameter& w, Parameter* bias, WeightLayout layout) {
  return linear(tape, x, w, bias, layout, nullptr);
}

Tensor linear_gelu(Tape& tape, const Tensor& x, Parameter& w, Parameter& bias,
                   WeightLayout layout) {
  if (!tape.stream().device().is_cuda()) return gelu(tape, linear(tape, x, w, &bias, layout));
  Tensor y;
  const Tensor h = linear(tape, x, w, &bias, layout, &y);
  record_tanh_gelu(tape, h, y);
  return y;
}

Tensor gelu_mlp(Tape& tape, const Tensor& x, Parameter& w_in, Parameter& b_in, Parameter& w_out,
                Parameter* b_out, WeightLayout layout) {
  if (!tape.stream().device().is_cuda())
    return linear(tape, linear_gelu(tape, x, w_in, b_in, layout), w_out, b_out, layout);
  Tensor y;
  const Tensor h = linear(tape, x, w_in, &b_in, layout, &y);
  return linear(tape, y, w_out, b_out, layout, nullptr, h);
}

}  // namespace tessera::ops

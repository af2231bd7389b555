#include "ops/normalize.h"

#include <vector>

#include "engine/elementwise.h"
#include "engine/init.h"
#include "ops/host_workspace.h"
#include "ops/lanes.h"
#include "ops/normalize_cuda.h"
#include "ops/pointwise.h"
#include "ops/vector_math.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Parameter;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

template <class T>
void forward(const NormForward& n) {
  const std::int64_t rows = n.y.shape().rows(), cols = n.y.dim(-1);
  const auto size = static_cast<float>(cols);
  const T *w = n.w.data<T>(), *bias = data_or_null<T>(n.bias);
  float *mean = data_or_null<float>(n.mean), *rstd = n.rstd.data<float>();
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* x = n.x.data<T>() + r * cols;
    T* y = n.y.data<T>() + r * cols;
    if (n.h.defined()) {
      T* sum = n.sum.data<T>() + r * cols;
      write_elements(sum, cols, false, [x, h = n.h.data<T>() + r * cols](std::int64_t j) {
        return to_f32(x[j]) + to_f32(h[j]);
      });
      x = sum;
    }
    float m = 0;
    if (mean != nullptr)
      m = mean[r] = lane_sum(cols, [x](std::int64_t j) { return to_f32(x[j]); }) / size;
    const float squares = lane_sum(cols, [x, m](std::int64_t j) {
      const float d = to_f32(x[j]) - m;
      return d * d;
    });
    const float s = rstd[r] = 1.0f / std::sqrt(squares / size + n.eps);
    const auto scaled = [=](std::int64_t j) { return (to_f32(x[j]) - m) * s * to_f32(w[j]); };
    if (bias != nullptr) {
      write_elements(y, cols, false, [=](std::int64_t j) { return scaled(j) + to_f32(bias[j]); });
    } else {
      write_elements(y, cols, false, scaled);
    }
  }
}

// With g = dy w and xhat = (x - mean) rstd:
//   dx = rstd (g - mean(g) - xhat mean(g xhat)), without the term mean(g) if no mean was removed;
//   dw = sum over rows of dy xhat, dbias = sum over rows of dy, rows in order.
// The sums start at 0; null if nobody wants them.
template <class T>
void backward(const NormBackward& n, float* dw, float* dbias) {
  const std::int64_t rows = n.x.shape().rows(), cols = n.x.dim(-1);
  const auto size = static_cast<float>(cols);
  const T *x = n.x.data<T>(), *dy = n.dy.data<T>(), *w = n.w.data<T>();
  const T* residual = data_or_null<T>(n.residual);
  const float *mean = data_or_null<float>(n.mean), *rstd = n.rstd.data<float>();
  T* dx = data_or_null<T>(n.dx.dst);
  for (std::int64_t r = 0; r < rows; ++r, x += cols, dy += cols) {
    const float m = mean != nullptr ? mean[r] : 0, s = rstd[r];
    const auto g = [=](std::int64_t j) { return to_f32(dy[j]) * to_f32(w[j]); };
    const auto xhat = [=](std::int64_t j) { return (to_f32(x[j]) - m) * s; };
    if (dx != nullptr) {
      const float g_mean = mean != nullptr ? lane_sum(cols, g) / size : 0;
      const float gx_mean = lane_sum(cols, [=](std::int64_t j) { return g(j) * xhat(j); }) / size;
      const auto value = [=](std::int64_t j) { return s * (g(j) - g_mean - xhat(j) * gx_mean); };
      if (residual != nullptr) {
        write_elements(
            dx + r * cols, cols, n.dx.accumulate,
            [value, d = residual + r * cols](std::int64_t j) { return to_f32(d[j]) + value(j); });
      } else {
        write_elements(dx + r * cols, cols, n.dx.accumulate, value);
      }
    }
    if (dw != nullptr)
      write_elements(dw, cols, true, [=](std::int64_t j) { return to_f32(dy[j]) * xhat(j); });
    if (dbias != nullptr) engine::add(dbias, dy, cols);
  }
}

// Works with f32 sums over rows, `dw` and `dbias`, which are then stored: one rounding, whatever
// the dtype.
void run_backward(const NormBackward& n, const Tensor& dw, const Tensor& dbias) {
  for (const Tensor* sums : {&dw, &dbias}) {
    if (sums->defined()) engine::fill_zero(*sums);
  }
  engine::dispatch_float(n.x.dtype(), "normalize", [&](auto t) {
    backward<decltype(t)>(n, data_or_null<float>(dw), data_or_null<float>(dbias));
  });
  if (n.dw) engine::assign_or_add(n.dw.dst, dw, n.dw.accumulate);
  if (n.dbias) engine::assign_or_add(n.dbias.dst, dbias, n.dbias.accumulate);
}

void launch_forward(const Tape& tape, const NormForward& n) {
  const bool centred = n.mean.defined(), adds = n.h.defined(), shifts = n.bias.defined();
  const int per_element = (centred ? 7 : 4) + (shifts ? 1 : 0) + (adds ? 1 : 0);
  tape.stream().launch(
      {.name = adds ? (centred ? "add_layernorm.forward" : "add_rmsnorm.forward")
                    : (centred ? "layernorm.forward" : "rmsnorm.forward"),
       .flops = static_cast<double>(n.x.numel()) * per_element,
       .bytes_read = (adds ? 2 : 1) * n.x.nbytes() + (shifts ? 2 : 1) * n.w.nbytes(),
       .bytes_written = (adds ? 2 : 1) * n.y.nbytes() + (centred ? 2 : 1) * n.rstd.nbytes()},
      [=] {
        engine::dispatch_float(n.x.dtype(), "normalize", [&](auto t) { forward<decltype(t)>(n); });
      },
      [&](const auto& stream) { normalize_forward_cuda(stream, n); });
}

void launch_backward(Tape& tape, const NormBackward& n) {
  const bool centred = n.mean.defined(), adds = n.residual.defined();
  engine::Work work{.name = adds ? (centred ? "add_layernorm.backward" : "add_rmsnorm.backward")
                                 : (centred ? "layernorm.backward" : "rmsnorm.backward"),
                    .bytes_read = (adds ? 3 : 2) * n.x.nbytes() + n.w.nbytes()};
  for (const GradTarget* target : {&n.dx, &n.dw, &n.dbias}) {
    if (!*target) continue;
    work.bytes_read += target->accumulate ? target->dst.nbytes() : 0;
    work.bytes_written += target->dst.nbytes();
  }
  const int of_dx = (centred ? 14 : 9) + (n.dx.accumulate ? 1 : 0) + (adds ? 1 : 0) +
                    (n.dx.wants_column_sums ? 1 : 0);
  const int per_element = (n.dx ? of_dx : 0) + (n.dw ? (centred ? 4 : 3) : 0) + (n.dbias ? 1 : 0);
  work.flops = static_cast<double>(n.x.numel()) * per_element;
  const auto sums_of = [&](const GradTarget& target) {
    return target ? host_workspace(tape, target.dst.shape(), "normalize.sums") : Tensor();
  };
  Tensor dx_sums;
  tape.stream().launch(
      work, [n, dw = sums_of(n.dw), dbias = sums_of(n.dbias)] { run_backward(n, dw, dbias); },
      [&](const auto& stream) { dx_sums = normalize_backward_cuda(stream, tape.memory(), n); });
  if (dx_sums.defined()) tape.leave_column_sums(n.dx.dst, dx_sums);
}

Tensor use(Tape& tape, const Tensor& x, Parameter& p) {
  const Tensor& w = tape.use(p);
  engine::require(
      x.shape().rank() > 0 && w.shape() == engine::Shape{x.dim(-1)} && w.dtype() == x.dtype(),
      "[normalize] expected x (..., C) and parameters (C) alike, got {} {} and {} {} ({})",
      name_of(x.dtype()), x.shape(), name_of(w.dtype()), w.shape(), p.name);
  return w;
}

// What stands for weights where there are none.
Tensor ones(Tape& tape, const Tensor& x) {
  engine::require(x.shape().rank() > 0, "[normalize] expected x (..., C), got {} ({})", x.shape(),
                  x.name());
  engine::dispatch_float(x.dtype(), "normalize", [](auto) {});
  const Tensor w = tape.empty({x.dim(-1)}, x.dtype(), "normalize.ones");
  engine::launch_init(tape.stream(), engine::Init::ones(), w, 0, w.name(), 0);
  return w;
}

// Checks, and takes memory for what is written.
NormForward prepare(Tape& tape, Norm norm, const Tensor& x, Parameter* w, Parameter* bias,
                    float eps) {
  NormForward n{.x = x, .w = w != nullptr ? use(tape, x, *w) : ones(tape, x), .eps = eps};
  if (bias != nullptr) n.bias = use(tape, x, *bias);
  const bool centred = norm == Norm::kLayer;
  const engine::Shape per_row = x.shape().drop_last();
  n.y = tape.empty(x.shape(), x.dtype(), centred ? "layernorm" : "rmsnorm");
  if (centred) n.mean = tape.empty(per_row, DType::kF32, "layernorm.mean");
  n.rstd = tape.empty(per_row, DType::kF32, "normalize.rstd");
  return n;
}

GradTarget target_of(Tape& tape, Parameter* p) {
  return p != nullptr ? tape.grad_target(*p) : GradTarget{};
}

// Whose input nobody needs the gradient of but a norm.
void record_normalize(Tape& tape, const NormForward& n, const Tensor& x, Parameter* w,
                      Parameter* bias) {
  const Tensor unscaled = w == nullptr ? n.w : Tensor();
  tape.record("normalize", n.y,
              [&tape, x, mean = n.mean, rstd = n.rstd, w, unscaled, bias](const Tensor& dy) {
                const NormBackward back{.dx = tape.grad_target(x),
                                        .dw = target_of(tape, w),
                                        .dbias = target_of(tape, bias),
                                        .residual = {},
                                        .dy = dy,
                                        .x = x,
                                        .w = w != nullptr ? w->value : unscaled,
                                        .mean = mean,
                                        .rstd = rstd};
                if (back.dx || back.dw || back.dbias) launch_backward(tape, back);
              });
}

bool needs_grad(Tape& tape, Parameter* w, Parameter* bias) {
  const bool wants_dw = w != nullptr && tape.needs_grad(*w);
  const bool wants_dbias = bias != nullptr && tape.needs_grad(*bias);
  return wants_dw || wants_dbias;
}

}  // namespace

Tensor normalize(Tape& tape, Norm norm, const Tensor& x, Parameter* w, Parameter* bias, float eps) {
  const NormForward n = prepare(tape, norm, x, w, bias, eps);
  const bool wants_dx = tape.needs_grad(x);
  launch_forward(tape, n);
  if (needs_grad(tape, w, bias) || wants_dx) record_normalize(tape, n, x, w, bias);
  return n.y;
}

NormOfSum add_normalize(Tape& tape, Norm norm, const Tensor& x, const Tensor& h, Parameter& w,
                        Parameter* bias, float eps) {
  engine::require(h.shape() == x.shape() && h.dtype() == x.dtype(),
                  "[normalize] expected two tensors alike, got {} {} and {} {} ({}, {})",
                  name_of(x.dtype()), x.shape(), name_of(h.dtype()), h.shape(), x.name(), h.name());
  NormForward n = prepare(tape, norm, x, &w, bias, eps);
  n.h = h;
  n.sum = tape.empty(x.shape(), x.dtype(), "add");
  const bool wants_dx = tape.needs_grad(x), wants_dh = tape.needs_grad(h);
  launch_forward(tape, n);
  if (!wants_dx && !wants_dh) {  // the sum is data
    if (needs_grad(tape, &w, bias)) record_normalize(tape, n, n.sum, &w, bias);
    return {n.sum, n.y};
  }
  tape.record("add_normalize", {n.sum, n.y},
              [&tape, x = x.without_data(), h = h.without_data(), sum = n.sum, mean = n.mean,
               rstd = n.rstd, &w, bias](const std::vector<Tensor>& douts) {
                const Tensor &dsum = douts[0], &dy = douts[1];
                GradTarget dx{dsum};
                if (dy.defined()) {
                  dx.dst = tape.empty(sum.shape(), sum.dtype(), sum.name());
                  dx.wants_column_sums = tape.wants_column_sums(x) || tape.wants_column_sums(h);
                  const NormBackward back{.dx = dx,
                                          .dw = tape.grad_target(w),
                                          .dbias = target_of(tape, bias),
                                          .residual = dsum,
                                          .dy = dy,
                                          .x = sum,
                                          .w = w.value,
                                          .mean = mean,
                                          .rstd = rstd};
                  if (back.dx || back.dw || back.dbias) launch_backward(tape, back);
                }
                tape.pass_grad(x, dx.dst);
                tape.pass_grad(h, dx.dst);
              });
  return {n.sum, n.y};
}

}  // namespace tessera::ops

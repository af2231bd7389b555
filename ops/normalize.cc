#include "ops/normalize.h"

#include "engine/elementwise.h"
#include "ops/pointwise.h"
#include "ops/vector_math.h"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Parameter;
using engine::Tape;
using engine::Tensor;
using engine::to_f32;

namespace {

template <class T>
const T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

// `mean` may be null: then no mean is removed. `bias` may be null.
template <class T>
void forward(T* y, float* mean, float* rstd, const T* x, const T* w, const T* bias,
             std::int64_t rows, std::int64_t cols, float eps) {
  const auto size = static_cast<float>(cols);
  for (std::int64_t r = 0; r < rows; ++r, x += cols, y += cols) {
    float m = 0;
    if (mean != nullptr)
      m = mean[r] = lane_sum(cols, [x](std::int64_t j) { return to_f32(x[j]); }) / size;
    const float squares = lane_sum(cols, [x, m](std::int64_t j) {
      const float d = to_f32(x[j]) - m;
      return d * d;
    });
    const float s = rstd[r] = 1.0f / std::sqrt(squares / size + eps);
    const auto scaled = [=](std::int64_t j) { return (to_f32(x[j]) - m) * s * to_f32(w[j]); };
    if (bias != nullptr) {
      write_elements(y, cols, false, [=](std::int64_t j) { return scaled(j) + to_f32(bias[j]); });
    } else {
      write_elements(y, cols, false, scaled);
    }
  }
}

// With g = dy w and xhat = (x - mean) rstd:
//   dx = rstd (g - mean(g) - xhat mean(g xhat)), without the term mean(g) if `mean` is null;
//   dw = sum over rows of dy xhat, dbias = sum over rows of dy, rows in order.
// Each of dx, dw, dbias may be null; dw and dbias start at 0.
template <class T>
void backward(T* dx, bool accumulate, float* dw, float* dbias, const T* dy, const T* x,
              const float* mean, const float* rstd, const T* w, std::int64_t rows,
              std::int64_t cols) {
  const auto size = static_cast<float>(cols);
  for (std::int64_t r = 0; r < rows; ++r, x += cols, dy += cols) {
    const float m = mean != nullptr ? mean[r] : 0, s = rstd[r];
    const auto g = [=](std::int64_t j) { return to_f32(dy[j]) * to_f32(w[j]); };
    const auto xhat = [=](std::int64_t j) { return (to_f32(x[j]) - m) * s; };
    if (dx != nullptr) {
      const float g_mean = mean != nullptr ? lane_sum(cols, g) / size : 0;
      const float gx_mean = lane_sum(cols, [=](std::int64_t j) { return g(j) * xhat(j); }) / size;
      write_elements(dx + r * cols, cols, accumulate,
                     [=](std::int64_t j) { return s * (g(j) - g_mean - xhat(j) * gx_mean); });
    }
    if (dw != nullptr)
      write_elements(dw, cols, true, [=](std::int64_t j) { return to_f32(dy[j]) * xhat(j); });
    if (dbias != nullptr) engine::add(dbias, dy, cols);
  }
}

struct Saved {
  Tensor mean;  // undefined for kRms
  Tensor rstd;
};

// f32 sums over rows for the gradient of a parameter; undefined if nobody wants it.
Tensor zero_sums(const Tape& tape, const GradTarget& target) {
  if (!target) return {};
  return Tensor::zeros(tape.memory(), target.dst.shape(), DType::kF32, "normalize.sums",
                       Category::kWorkspace);
}

void launch_backward(const Tape& tape, const GradTarget& dx, const GradTarget& dw,
                     const GradTarget& dbias, const Tensor& dy, const Tensor& x, const Saved& saved,
                     const Tensor& w) {
  const Tensor dw_sums = zero_sums(tape, dw), dbias_sums = zero_sums(tape, dbias);
  const bool centred = saved.mean.defined();
  engine::Work work{.name = centred ? "layernorm.backward" : "rmsnorm.backward",
                    .bytes_read = dy.nbytes() + x.nbytes() + w.nbytes()};
  for (const GradTarget* target : {&dx, &dw, &dbias}) {
    if (!*target) continue;
    work.bytes_read += target->accumulate ? target->dst.nbytes() : 0;
    work.bytes_written += target->dst.nbytes();
  }
  const int per_element = (dx ? (centred ? 14 : 9) + (dx.accumulate ? 1 : 0) : 0) +
                          (dw ? (centred ? 4 : 3) : 0) + (dbias ? 1 : 0);
  work.flops = static_cast<double>(x.numel()) * per_element;
  tape.stream().launch(work, [=] {
    engine::dispatch_float(x.dtype(), "normalize", [&](auto t) {
      using T = decltype(t);
      backward<T>(dx ? dx.dst.data<T>() : nullptr, dx.accumulate,
                  dw ? dw_sums.data<float>() : nullptr, dbias ? dbias_sums.data<float>() : nullptr,
                  dy.data<T>(), x.data<T>(), data_or_null<float>(saved.mean),
                  saved.rstd.data<float>(), w.data<T>(), x.shape().rows(), x.dim(-1));
    });
    if (dw) engine::assign_or_add(dw.dst, dw_sums, dw.accumulate);
    if (dbias) engine::assign_or_add(dbias.dst, dbias_sums, dbias.accumulate);
  });
}

void check(const Tensor& x, const Tensor& w, const Parameter& p) {
  engine::require(
      x.shape().rank() > 0 && w.shape() == engine::Shape{x.dim(-1)} && w.dtype() == x.dtype(),
      "[normalize] expected x (..., C) and parameters (C) alike, got {} {} and {} {} ({})",
      name_of(x.dtype()), x.shape().str(), name_of(w.dtype()), w.shape().str(), p.name);
}

}  // namespace

Tensor normalize(Tape& tape, Norm norm, const Tensor& x, Parameter& w, Parameter* bias, float eps) {
  const Tensor scale = tape.use(w);
  const Tensor shift = bias != nullptr ? tape.use(*bias) : Tensor();
  check(x, scale, w);
  if (bias != nullptr) check(x, shift, *bias);
  const bool centred = norm == Norm::kLayer;
  const engine::Shape per_row = x.shape().drop_last();
  const Tensor y = tape.empty(x.shape(), x.dtype(), centred ? "layernorm" : "rmsnorm");
  const Saved saved{centred ? tape.empty(per_row, DType::kF32, "layernorm.mean") : Tensor(),
                    tape.empty(per_row, DType::kF32, "normalize.rstd")};
  tape.stream().launch(
      {.name = centred ? "layernorm.forward" : "rmsnorm.forward",
       .flops = static_cast<double>(x.numel()) * ((centred ? 7 : 4) + (bias != nullptr ? 1 : 0)),
       .bytes_read = x.nbytes() + scale.nbytes() + (bias != nullptr ? shift.nbytes() : 0),
       .bytes_written = y.nbytes() + (centred ? 2 : 1) * saved.rstd.nbytes()},
      [=] {
        engine::dispatch_float(x.dtype(), "normalize", [&](auto t) {
          using T = decltype(t);
          forward<T>(y.data<T>(), centred ? saved.mean.data<float>() : nullptr,
                     saved.rstd.data<float>(), x.data<T>(), scale.data<T>(), data_or_null<T>(shift),
                     x.shape().rows(), x.dim(-1), eps);
        });
      });
  tape.record("normalize", y, [&tape, x, saved, &w, bias](const Tensor& dy) {
    const GradTarget dx = tape.grad_target(x), dw = tape.grad_target(w);
    const GradTarget dbias = bias != nullptr ? tape.grad_target(*bias) : GradTarget{};
    if (dx || dw || dbias) launch_backward(tape, dx, dw, dbias, dy, x, saved, w.value);
  });
  return y;
}

}  // namespace tessera::ops

#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "engine/elementwise.h"
#include "ops/gemm.h"
#include "ops/softmax_rows.h"

namespace tessera::ops {

using engine::Category;
using engine::DType;
using engine::GradTarget;
using engine::Memory;
using engine::Parameter;
using engine::Tape;
using engine::Tensor;

namespace {

Tensor workspace(const Memory& memory, std::int64_t rows, std::int64_t cols) {
  return Tensor::empty(memory, {rows, cols}, DType::kF32, "cross_entropy.scratch",
                       Category::kWorkspace);
}

// What backward needs of a row beside its logits.
struct RowStats {
  float max;
  float sum;  // of exp(logit - max)
};

// The rows of one loss. Their logits are handed in one at a time, in f32, and change in place:
// logits -> forward() or exponentials() -> exp(logit - max) -> gradient() -> dlogits.
struct Rows {
  Tensor targets;  // (N) i32
  Tensor stats;    // (N, 2) f32: RowStats
  std::int64_t vocab_size;
  std::int32_t ignore_index;

  std::int64_t count() const { return targets.numel(); }
  std::int32_t target(std::int64_t i) const { return targets.data<std::int32_t>()[i]; }
  bool ignored(std::int64_t i) const { return target(i) == ignore_index; }
  RowStats& row_stats(std::int64_t i) const {
    return reinterpret_cast<RowStats*>(stats.data<float>())[i];
  }

  void check_targets() const {
    for (std::int64_t i = 0; i < count(); ++i) {
      engine::require(ignored(i) || (target(i) >= 0 && target(i) < vocab_size),
                      "[cross_entropy] expected a target in [0, {}) or {}, got {} at position {} "
                      "({})",
                      vocab_size, ignore_index, target(i), i, targets.name());
    }
  }

  // 1 / the number of targets that count; 0 if there are none.
  double weight() const {
    const auto all = targets.span<std::int32_t>();
    const std::int64_t counted = count() - std::count(all.begin(), all.end(), ignore_index);
    return counted == 0 ? 0 : 1 / static_cast<double>(counted);
  }

  // Returns the loss of row i; 0 if it is ignored.
  double forward(std::int64_t i, float* x) const {
    if (ignored(i)) return 0;
    constexpr std::int64_t kBlock = 1024;  // sums of a block are f32, sums of blocks double
    const double chosen = x[target(i)];
    const float max = row_max(x, vocab_size);
    double sum = 0;
    for (std::int64_t v = 0; v < vocab_size; v += kBlock)
      sum += exp_row(x + v, std::min(kBlock, vocab_size - v), max);
    row_stats(i) = {max, static_cast<float>(sum)};
    return std::log(sum) + max - chosen;
  }

  void exponentials(std::int64_t i, float* x) const {
    if (!ignored(i)) exp_row(x, vocab_size, row_stats(i).max);
  }

  void gradient(std::int64_t i, float* x, float dloss) const {
    if (ignored(i)) {
      std::fill(x, x + vocab_size, 0.0f);
      return;
    }
    const float factor = dloss / row_stats(i).sum;
    for (std::int64_t v = 0; v < vocab_size; ++v) x[v] *= factor;
    x[target(i)] -= dloss;
  }

  // max, difference, exponential and sum of each logit; then the factor.
  double forward_flops() const { return logits() * (kExpFlops + 3); }
  double backward_flops(bool exponentials) const {
    return logits() * (exponentials ? kExpFlops + 3 : 1);
  }
  double logits() const { return static_cast<double>(count()) * static_cast<double>(vocab_size); }
};

// `x` has a row for each target.
Rows make_rows(const Tape& tape, const Tensor& x, const Tensor& targets, std::int64_t vocab_size,
               std::int32_t ignore_index) {
  engine::require(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16,
                  "[cross_entropy] expected f32 or bf16, got {} ({})", name_of(x.dtype()),
                  x.name());
  engine::require(targets.dtype() == DType::kI32,
                  "[cross_entropy] expected targets i32, got {} ({})", name_of(targets.dtype()),
                  targets.name());
  engine::require(x.numel() > 0 && targets.numel() == x.shape().rows(),
                  "[cross_entropy] expected a target for each row of {}, got {} ({})",
                  x.shape().str(), targets.shape().str(), targets.name());
  return {targets, tape.empty({targets.numel(), 2}, DType::kF32, "cross_entropy.stats"), vocab_size,
          ignore_index};
}

template <class T>
void logits_forward(const Rows& rows, const T* logits, float* row, float* loss) {
  double sum = 0;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    engine::cast(row, logits + i * rows.vocab_size, rows.vocab_size);
    sum += rows.forward(i, row);
  }
  *loss = static_cast<float>(sum * rows.weight());
}

template <class T>
void logits_backward(const Rows& rows, const T* logits, float dloss, T* dlogits, bool accumulate,
                     float* row) {
  const auto scale = static_cast<float>(dloss * rows.weight());
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    engine::cast(row, logits + i * rows.vocab_size, rows.vocab_size);
    rows.exponentials(i, row);
    rows.gradient(i, row, scale);
    engine::assign_or_add(dlogits + i * rows.vocab_size, row, rows.vocab_size, accumulate);
  }
}

// Rows of logits that live at one time: 8 MiB, but enough for the products to pay for reading w and
// updating its gradient as a whole with each chunk.
std::int64_t choose_chunk_rows(std::int64_t vocab_size) {
  return std::clamp<std::int64_t>((std::int64_t{8} << 20) / (vocab_size * 4), 256, 512);
}

// The fused op: what its kernels read.
struct Head {
  Memory memory;
  Rows rows;
  Tensor x;     // (N, C) f32 or bf16
  Tensor w;     // (V, C) f32 or bf16
  Tensor exps;  // (N, V) f32: exp(logit - max), or undefined
  std::int64_t width;
  std::int64_t chunk_rows;

  double product_flops() const { return gemm_flops(rows.count(), rows.vocab_size, width); }
  Tensor wide_w() const {
    if (w.dtype() == DType::kF32) return w;
    const Tensor wide = workspace(memory, rows.vocab_size, width);
    engine::cast(wide, w);
    return wide;
  }
  Tensor chunk_space() const {
    return exps.defined() ? Tensor() : workspace(memory, chunk_rows, rows.vocab_size);
  }
  // Where the logits of the chunk that starts at row `first` live.
  MatrixView<float> chunk(std::int64_t first, const Tensor& space) const {
    float* data =
        exps.defined() ? exps.data<float>() + first * rows.vocab_size : space.data<float>();
    return {data, std::min(chunk_rows, rows.count() - first), rows.vocab_size, rows.vocab_size};
  }
  template <class T>
  MatrixView<const T> x_rows(std::int64_t first, std::int64_t num_rows) const {
    return {x.data<T>() + first * width, num_rows, width, width};
  }
};

template <class T>
void head_forward(const Head& head, float* loss) {
  const Rows& rows = head.rows;
  const Tensor space = head.chunk_space(), w = head.wide_w();
  const auto w_view = matrix<const float>(w, rows.vocab_size, head.width);
  double sum = 0;
  for (std::int64_t first = 0; first < rows.count(); first += head.chunk_rows) {
    const MatrixView<float> logits = head.chunk(first, space);
    gemm(head.memory, head.x_rows<T>(first, logits.rows), w_view.t(), logits, false);
    for (std::int64_t i = 0; i < logits.rows; ++i)
      sum += rows.forward(first + i, logits.data + i * logits.ld);
  }
  *loss = static_cast<float>(sum * rows.weight());
}

template <class T>
void head_backward(const Head& head, float dloss, const GradTarget& dx, const GradTarget& dw) {
  const Rows& rows = head.rows;
  const Tensor space = head.chunk_space(), w = head.wide_w();
  const auto w_view = matrix<const float>(w, rows.vocab_size, head.width);
  const bool in_place = dw && dw.dst.dtype() == DType::kF32;
  const Tensor sum = !dw || in_place ? dw.dst : workspace(head.memory, rows.vocab_size, head.width);
  const auto scale = static_cast<float>(dloss * rows.weight());
  for (std::int64_t first = 0; first < rows.count(); first += head.chunk_rows) {
    const MatrixView<float> chunk = head.chunk(first, space);
    const MatrixView<const T> x = head.x_rows<T>(first, chunk.rows);
    if (!head.exps.defined()) gemm(head.memory, x, w_view.t(), chunk, false);
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      float* row = chunk.data + i * chunk.ld;
      if (!head.exps.defined()) rows.exponentials(first + i, row);
      rows.gradient(first + i, row, scale);
    }
    const MatrixView<const float> dlogits = chunk;
    if (dx) {
      const MatrixView<T> dx_rows{dx.dst.data<T>() + first * head.width, chunk.rows, head.width,
                                  head.width};
      gemm(head.memory, dlogits, w_view, dx_rows, dx.accumulate);
    }
    if (dw) {
      gemm(head.memory, dlogits.t(), x, matrix<float>(sum, rows.vocab_size, head.width),
           first > 0 || (in_place && dw.accumulate));
    }
  }
  if (dw && !in_place) engine::assign_or_add(dw.dst, sum, dw.accumulate);
}

void launch_head_backward(const Tape& tape, const Head& head, const Tensor& dloss,
                          const GradTarget& dx, const GradTarget& dw) {
  const bool recompute = !head.exps.defined();
  const std::int64_t dx_nbytes = dx ? dx.dst.nbytes() : 0, dw_nbytes = dw ? dw.dst.nbytes() : 0;
  const int products = (dx ? 1 : 0) + (dw ? 1 : 0) + (recompute ? 1 : 0);
  tape.stream().launch(
      {.name = "linear_cross_entropy.backward",
       .flops = products * head.product_flops() + head.rows.backward_flops(recompute),
       .bytes_read = head.x.nbytes() + head.w.nbytes() + head.rows.targets.nbytes() +
                     head.rows.stats.nbytes() + (recompute ? 0 : head.exps.nbytes()) +
                     (dx.accumulate ? dx_nbytes : 0) + (dw.accumulate ? dw_nbytes : 0),
       .bytes_written = dx_nbytes + dw_nbytes},
      [=] {
        engine::dispatch_float(head.x.dtype(), "cross_entropy", [&](auto t) {
          head_backward<decltype(t)>(head, *dloss.data<float>(), dx, dw);
        });
      });
}

}  // namespace

Tensor cross_entropy(Tape& tape, const Tensor& logits, const Tensor& targets,
                     std::int32_t ignore_index) {
  const Rows rows = make_rows(tape, logits, targets, logits.dim(-1), ignore_index);
  const Tensor loss = tape.empty({}, DType::kF32, "cross_entropy");
  const Tensor row = workspace(tape.memory(), 1, rows.vocab_size);
  tape.stream().launch({.name = "cross_entropy.forward",
                        .flops = rows.forward_flops(),
                        .bytes_read = logits.nbytes() + targets.nbytes(),
                        .bytes_written = rows.stats.nbytes() + loss.nbytes()},
                       [=] {
                         rows.check_targets();
                         engine::dispatch_float(logits.dtype(), "cross_entropy", [&](auto t) {
                           logits_forward(rows, logits.data<decltype(t)>(), row.data<float>(),
                                          loss.data<float>());
                         });
                       });
  tape.record("cross_entropy", loss, [&tape, rows, logits](const Tensor& dloss) {
    const GradTarget dx = tape.grad_target(logits);
    if (!dx) return;
    const Tensor row = workspace(tape.memory(), 1, rows.vocab_size);
    tape.stream().launch({.name = "cross_entropy.backward",
                          .flops = rows.backward_flops(true),
                          .bytes_read = logits.nbytes() * (dx.accumulate ? 2 : 1) +
                                        rows.targets.nbytes() + rows.stats.nbytes(),
                          .bytes_written = logits.nbytes()},
                         [=] {
                           engine::dispatch_float(logits.dtype(), "cross_entropy", [&](auto t) {
                             using T = decltype(t);
                             logits_backward(rows, logits.data<T>(), *dloss.data<float>(),
                                             dx.dst.data<T>(), dx.accumulate, row.data<float>());
                           });
                         });
  });
  return loss;
}

Tensor linear_cross_entropy(Tape& tape, const Tensor& x, Parameter& w, const Tensor& targets,
                            const LinearCrossEntropyOptions& options) {
  const Tensor value = tape.use(w);
  engine::require(value.shape().rank() == 2 && value.numel() > 0 && value.dim(1) == x.dim(-1),
                  "[cross_entropy] expected a weight (V, {}), got {} ({})", x.dim(-1),
                  value.shape().str(), w.name);
  engine::require(options.chunk_rows >= 0,
                  "[cross_entropy] expected chunk_rows of at least 0, got {}", options.chunk_rows);
  const std::int64_t vocab_size = value.dim(0);
  const Rows rows = make_rows(tape, x, targets, vocab_size, options.ignore_index);
  const std::int64_t chunk_rows = std::min(
      rows.count(), options.chunk_rows == 0 ? choose_chunk_rows(vocab_size) : options.chunk_rows);
  const bool wants_grad = tape.recording() && (w.trainable || tape.needs_grad(x));
  const bool saves = wants_grad && rows.count() <= options.max_saved_numel / vocab_size;
  const Tensor exps =
      saves ? tape.empty({rows.count(), vocab_size}, DType::kF32, "cross_entropy.exponentials")
            : Tensor();
  const Head head{tape.memory(), rows, x, value, exps, x.dim(-1), chunk_rows};
  const Tensor loss = tape.empty({}, DType::kF32, "cross_entropy");
  tape.stream().launch(
      {.name = "linear_cross_entropy.forward",
       .flops = head.product_flops() + rows.forward_flops(),
       .bytes_read = x.nbytes() + value.nbytes() + targets.nbytes(),
       .bytes_written = rows.stats.nbytes() + loss.nbytes() + (saves ? exps.nbytes() : 0)},
      [=] {
        rows.check_targets();
        engine::dispatch_float(x.dtype(), "cross_entropy", [&](auto t) {
          head_forward<decltype(t)>(head, loss.data<float>());
        });
      });
  tape.record("linear_cross_entropy", loss, [&tape, &w, head](const Tensor& dloss) {
    const GradTarget dx = tape.grad_target(head.x), dw = tape.grad_target(w);
    if (dx || dw) launch_head_backward(tape, head, dloss, dx, dw);
  });
  return loss;
}

}  // namespace tessera::ops

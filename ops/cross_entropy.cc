#include "ops/cross_entropy.h"

#include <string_view>

#include "engine/elementwise.h"
#include "ops/cross_entropy_cuda.h"
#include "ops/cross_entropy_rows.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

namespace {

// The mean of the losses, or the loss of each row.
struct Kind {
  bool is_mean;
  std::string_view op, forward, backward;
};
constexpr Kind kMean{true, "cross_entropy", "cross_entropy.forward", "cross_entropy.backward"};
constexpr Kind kEachRow{false, "cross_entropy_rows", "cross_entropy_rows.forward",
                        "cross_entropy_rows.backward"};

template <class T>
void logits_forward(const Kind& kind, const CrossEntropyRows& rows, const T* logits, float* row,
                    float* losses) {
  double sum = 0;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    engine::cast(row, logits + i * rows.vocab_size, rows.vocab_size);
    const double loss = rows.forward(i, row);
    sum += loss;
    if (!kind.is_mean) losses[i] = static_cast<float>(loss);
  }
  if (kind.is_mean) *losses = static_cast<float>(sum * rows.row_weight());
}

template <class T>
void logits_backward(const Kind& kind, const CrossEntropyRows& rows, const T* logits,
                     const float* dlosses, T* dlogits, bool accumulate, float* row) {
  const auto scale = kind.is_mean ? static_cast<float>(*dlosses * rows.row_weight()) : 0.0f;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    engine::cast(row, logits + i * rows.vocab_size, rows.vocab_size);
    rows.exponentials(i, row);
    rows.gradient(i, row, kind.is_mean ? scale : dlosses[i]);
    engine::assign_or_add(dlogits + i * rows.vocab_size, row, rows.vocab_size, accumulate);
  }
}

void launch_backward(const Tape& tape, const Kind& kind, const CrossEntropyRows& rows,
                     const Tensor& logits, const GradTarget& dx, const Tensor& dlosses) {
  // One row on the CPU, on a GPU the scales of a mean.
  const bool on_gpu = dlosses.device().is_cuda();
  const Tensor scratch =
      on_gpu && !kind.is_mean
          ? Tensor()
          : cross_entropy_workspace(tape.memory(), 1, on_gpu ? 3 : rows.vocab_size);
  tape.stream().launch(
      {.name = kind.backward,
       .flops = rows.backward_flops(true),
       .bytes_read = logits.nbytes() * (dx.accumulate ? 2 : 1) + rows.targets.nbytes() +
                     rows.stats.nbytes() + (kind.is_mean ? 0 : dlosses.nbytes()),
       .bytes_written = logits.nbytes()},
      [=] {
        engine::dispatch_float(logits.dtype(), "cross_entropy", [&](auto t) {
          using T = decltype(t);
          logits_backward(kind, rows, logits.data<T>(), dlosses.data<float>(), dx.dst.data<T>(),
                          dx.accumulate, scratch.data<float>());
        });
      },
      [&](const auto& stream) {
        RowScales scales{.data = dlosses.data<float>(), .step = 1};
        if (kind.is_mean) {
          cross_entropy_scales_cuda(stream, rows, dlosses.data<float>(), scratch.data<float>());
          scales = {.data = scratch.data<float>(), .step = 0};
        }
        cross_entropy_gradient_cuda(
            stream, rows, device_matrix(logits, rows.count(), rows.vocab_size),
            device_matrix(dx.dst, rows.count(), rows.vocab_size), scales, dx.accumulate);
      });
}

Tensor of_logits(const Kind& kind, Tape& tape, const Tensor& logits, const Tensor& targets,
                 std::int32_t ignore_index) {
  const std::int64_t vocab_size = logits.dim(-1);
  const CrossEntropyRows rows =
      make_cross_entropy_rows(tape, logits, targets, vocab_size, ignore_index, kind.is_mean);
  const bool wants_grad = tape.needs_grad(logits);
  const Tensor losses =
      tape.empty(kind.is_mean ? engine::Shape{} : targets.shape(), DType::kF32, kind.op);
  // One row on the CPU, on a GPU the losses of the rows that a mean is of.
  const bool on_gpu = losses.device().is_cuda();
  const Tensor scratch =
      on_gpu && !kind.is_mean
          ? Tensor()
          : cross_entropy_workspace(tape.memory(), 1, on_gpu ? rows.count() : vocab_size);
  tape.stream().launch(
      {.name = kind.forward,
       .flops = rows.forward_flops(),
       .bytes_read = logits.nbytes() + targets.nbytes(),
       .bytes_written = rows.stats.nbytes() + losses.nbytes()},
      [=] {
        rows.check_targets();
        engine::dispatch_float(logits.dtype(), "cross_entropy", [&](auto t) {
          logits_forward(kind, rows, logits.data<decltype(t)>(), scratch.data<float>(),
                         losses.data<float>());
        });
      },
      [&](const auto& stream) {
        auto* row_losses = (kind.is_mean ? scratch : losses).data<float>();
        cross_entropy_forward_cuda(stream, rows, 0, device_matrix(logits, rows.count(), vocab_size),
                                   row_losses, nullptr);
        if (kind.is_mean) cross_entropy_mean_cuda(stream, rows, row_losses, losses.data<float>());
      });
  if (!wants_grad) return losses;
  tape.record(kind.op, losses, [&tape, &kind, rows, logits](const Tensor& dlosses) {
    if (const GradTarget dx = tape.grad_target(logits))
      launch_backward(tape, kind, rows, logits, dx, dlosses);
  });
  return losses;
}

}  // namespace

Tensor cross_entropy(Tape& tape, const Tensor& logits, const Tensor& targets,
                     std::int32_t ignore_index) {
  return of_logits(kMean, tape, logits, targets, ignore_index);
}

Tensor cross_entropy_rows(Tape& tape, const Tensor& logits, const Tensor& targets,
                          std::int32_t ignore_index) {
  return of_logits(kEachRow, tape, logits, targets, ignore_index);
}

}  // namespace tessera::ops

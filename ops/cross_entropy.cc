#include "ops/cross_entropy.h"

#include "engine/elementwise.h"
#include "ops/cross_entropy_cuda.h"
#include "ops/cross_entropy_rows.h"

namespace tessera::ops {

using engine::DType;
using engine::GradTarget;
using engine::Tape;
using engine::Tensor;

namespace {

template <class T>
void logits_forward(const CrossEntropyRows& rows, const T* logits, float* row, float* loss) {
  double sum = 0;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    engine::cast(row, logits + i * rows.vocab_size, rows.vocab_size);
    sum += rows.forward(i, row);
  }
  *loss = static_cast<float>(sum * rows.mean_weight());
}

template <class T>
void logits_backward(const CrossEntropyRows& rows, const T* logits, float dloss, T* dlogits,
                     bool accumulate, float* row) {
  const auto scale = static_cast<float>(dloss * rows.mean_weight());
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    engine::cast(row, logits + i * rows.vocab_size, rows.vocab_size);
    rows.exponentials(i, row);
    rows.gradient(i, row, scale);
    engine::assign_or_add(dlogits + i * rows.vocab_size, row, rows.vocab_size, accumulate);
  }
}

}  // namespace

Tensor cross_entropy(Tape& tape, const Tensor& logits, const Tensor& targets,
                     std::int32_t ignore_index) {
  const std::int64_t vocab_size = logits.dim(-1);
  const CrossEntropyRows rows =
      make_cross_entropy_rows(tape, logits, targets, vocab_size, ignore_index);
  const bool wants_grad = tape.needs_grad(logits);
  const Tensor loss = tape.empty({}, DType::kF32, "cross_entropy");
  // One row on the CPU, the loss of each row on a GPU.
  const Tensor scratch = cross_entropy_workspace(
      tape.memory(), 1, loss.device().is_cuda() ? rows.count() : vocab_size);
  tape.stream().launch(
      {.name = "cross_entropy.forward",
       .flops = rows.forward_flops(),
       .bytes_read = logits.nbytes() + targets.nbytes(),
       .bytes_written = rows.stats.nbytes() + loss.nbytes()},
      [=] {
        rows.check_targets();
        engine::dispatch_float(logits.dtype(), "cross_entropy", [&](auto t) {
          logits_forward(rows, logits.data<decltype(t)>(), scratch.data<float>(),
                         loss.data<float>());
        });
      },
      [&](const auto& stream) {
        cross_entropy_forward_cuda(stream, rows, 0, device_matrix(logits, rows.count(), vocab_size),
                                   scratch.data<float>(), nullptr);
        cross_entropy_mean_cuda(stream, rows, scratch.data<float>(), loss.data<float>());
      });
  if (!wants_grad) return loss;
  tape.record("cross_entropy", loss, [&tape, rows, logits](const Tensor& dloss) {
    const GradTarget dx = tape.grad_target(logits);
    if (!dx) return;
    // One row on the CPU, scales on a GPU.
    const Tensor scratch =
        cross_entropy_workspace(tape.memory(), 1, dloss.device().is_cuda() ? 3 : rows.vocab_size);
    tape.stream().launch(
        {.name = "cross_entropy.backward",
         .flops = rows.backward_flops(true),
         .bytes_read = logits.nbytes() * (dx.accumulate ? 2 : 1) + rows.targets.nbytes() +
                       rows.stats.nbytes(),
         .bytes_written = logits.nbytes()},
        [=] {
          engine::dispatch_float(logits.dtype(), "cross_entropy", [&](auto t) {
            using T = decltype(t);
            logits_backward(rows, logits.data<T>(), *dloss.data<float>(), dx.dst.data<T>(),
                            dx.accumulate, scratch.data<float>());
          });
        },
        [&](const auto& stream) {
          cross_entropy_scales_cuda(stream, rows, dloss.data<float>(), scratch.data<float>());
          cross_entropy_gradient_cuda(stream, rows, 0,
                                      device_matrix(logits, rows.count(), rows.vocab_size),
                                      device_matrix(dx.dst, rows.count(), rows.vocab_size),
                                      scratch.data<float>(), dx.accumulate);
        });
  });
  return loss;
}

}  // namespace tessera::ops

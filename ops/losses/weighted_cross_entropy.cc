#include "ops/losses/weighted_cross_entropy.h"

#include "ops/cross_entropy.h"
#include "ops/losses/terms.h"
#include "ops/losses/weighted_cross_entropy_cuda.h"
#include "ops/mul.h"
#include "ops/pointwise.h"
#include "ops/sum.h"

namespace tessera::ops {

using engine::DType;
using engine::require;
using engine::Tape;
using engine::Tensor;

namespace {

void target_weights_cpu(const Tensor& weights, const Tensor& class_weights, const Tensor& targets,
                        std::int32_t ignore_index) {
  const auto* const of_class = class_weights.data<float>();
  const auto* const target = targets.data<std::int32_t>();
  for (std::int64_t i = 0; i < targets.numel(); ++i) {
    const bool is_ignored = target[i] == ignore_index;
    require(is_ignored || (target[i] >= 0 && target[i] < class_weights.numel()),
            "[target_weights] expected a target in [0, {}) or {}, got {} at position {} ({})",
            class_weights.numel(), ignore_index, target[i], i, targets.name());
    weights.data<float>()[i] = is_ignored ? 0 : of_class[target[i]];
  }
}

}  // namespace

Tensor target_weights(Tape& tape, const Tensor& class_weights, const Tensor& targets,
                      std::int32_t ignore_index) {
  require(class_weights.dtype() == DType::kF32 && class_weights.shape().rank() == 1,
          "[target_weights] expected weights of classes (V) f32, got {} {} ({})",
          name_of(class_weights.dtype()), class_weights.shape(), class_weights.name());
  require(targets.dtype() == DType::kI32, "[target_weights] expected targets i32, got {} ({})",
          name_of(targets.dtype()), targets.name());
  require(!tape.needs_grad(class_weights),
          "[target_weights] expected weights of classes that are data, got some whose gradient is "
          "wanted ({}): ops::stop_gradient() makes them data",
          class_weights.name());
  const Tensor weights = tape.empty(targets.shape(), DType::kF32, "target_weights");
  tape.stream().launch(
      {.name = "target_weights",
       .bytes_read = targets.nbytes() + class_weights.nbytes(),
       .bytes_written = weights.nbytes()},
      [=] { target_weights_cpu(weights, class_weights, targets, ignore_index); },
      [&](const auto& stream) {
        target_weights_cuda(stream, weights, class_weights, targets, ignore_index);
      });
  return weights;
}

Tensor weighted_cross_entropy(Tape& tape, const Tensor& logits, const Tensor& targets,
                              const Tensor& class_weights, std::int32_t ignore_index) {
  require(logits.shape().rank() > 0 && class_weights.shape() == engine::Shape{logits.dim(-1)},
          "[weighted_cross_entropy] expected a weight for each class of {}, got {} ({})",
          logits.shape(), class_weights.shape(), class_weights.name());
  const Tensor losses = cross_entropy_rows(tape, logits, targets, ignore_index);
  const Tensor weights = target_weights(tape, class_weights, targets, ignore_index);
  const Tensor total = sum(tape, weights);
  const Tensor share = tape.empty({}, DType::kF32, "weighted_cross_entropy");
  launch_pointwise(tape.stream(), {"weighted_cross_entropy.share", 1},
                   Pointwise<InverseOrZero>{{share}, {total}});
  return mul(tape, sum(tape, mul(tape, losses, weights)), share);
}

}  // namespace tessera::ops

// The rows of one softmax cross-entropy, which the ops of ops/cross_entropy.h share. Private to
// ops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "engine/tape.h"
#include "ops/block_sum.h"
#include "ops/softmax_rows.h"
#include "ops/vector_math.h"

namespace tessera::ops {

/// What backward needs of a row besides its logits.
struct RowStats {
  float max;
  float sum;  // of exp(logit - max)
};

/// On the CPU the logits of a row are handed in one at a time, in f32, and change in place:
/// logits -> forward() or exponentials() -> exp(logit - max) -> gradient() -> dlogits.
struct CrossEntropyRows {
  engine::Tensor targets;  // (N) i32
  engine::Tensor stats;    // (N, 2) f32: RowStats
  engine::Tensor weight;   // () f32, of a mean or sum on a GPU: row_weight(), by forward
  std::int64_t vocab_size;
  std::int32_t ignore_index;
  bool is_sum = false;  // of all rows; otherwise what is made of them is their mean

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

  // What the loss of each row is multiplied with: of a mean 1 / the number of targets that count,
  // and 0 if there are none.
  double row_weight() const {
    if (is_sum) return 1;
    const auto all = targets.span<std::int32_t>();
    const std::int64_t counted = count() - std::count(all.begin(), all.end(), ignore_index);
    return counted == 0 ? 0 : 1 / static_cast<double>(counted);
  }

  // Returns the loss of row i; 0 if it is ignored.
  double forward(std::int64_t i, float* x) const {
    if (ignored(i)) return 0;
    const double chosen = x[target(i)];
    const float max = row_max(x, vocab_size);
    const double sum =
        block_sum(vocab_size, [=](std::int64_t v) { return x[v] = exp(x[v] - max); });
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

inline engine::Tensor cross_entropy_workspace(const engine::Memory& memory, std::int64_t rows,
                                              std::int64_t cols,
                                              engine::DType dtype = engine::DType::kF32) {
  return engine::Tensor::empty(memory, {rows, cols}, dtype, "cross_entropy.scratch",
                               engine::Category::kWorkspace);
}

/// `x` has a row for each target; `is_mean`: a mean is wanted, which on a GPU has its weight.
/// Throws InvalidArgument if shapes or dtypes do not fit.
inline CrossEntropyRows make_cross_entropy_rows(engine::Tape& tape, const engine::Tensor& x,
                                                const engine::Tensor& targets,
                                                std::int64_t vocab_size, std::int32_t ignore_index,
                                                bool is_mean) {
  using engine::DType;
  engine::require(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16,
                  "[cross_entropy] expected f32 or bf16, got {} ({})", name_of(x.dtype()),
                  x.name());
  engine::require(targets.dtype() == DType::kI32,
                  "[cross_entropy] expected targets i32, got {} ({})", name_of(targets.dtype()),
                  targets.name());
  // As many in another order of dimensions would be those of other rows.
  const bool is_flat = targets.shape().rank() == 1 && targets.numel() == x.shape().rows();
  engine::require(x.numel() > 0 && (is_flat || targets.shape() == x.shape().drop_last()),
                  "[cross_entropy] expected a target for each row of {}, got {} ({})", x.shape(),
                  targets.shape(), targets.name());
  engine::require(vocab_size < std::int64_t{1} << 30,
                  "[cross_entropy] expected fewer than 2^30 classes, got {} ({})", vocab_size,
                  x.name());
  const bool has_weight = is_mean && tape.stream().device().is_cuda();
  return {targets, tape.empty({targets.numel(), 2}, DType::kF32, "cross_entropy.stats"),
          has_weight ? tape.empty({}, DType::kF32, "cross_entropy.weight") : engine::Tensor(),
          vocab_size, ignore_index};
}

}  // namespace tessera::ops

// The CUDA side of an optimizer's rule; see rule_optimizer.h. Light enough for nvcc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// Groups of parameters that one optimizer can have: more than anyone needs, and few enough that
/// what is kept of each counts for nothing compared with the parameters.
inline constexpr std::size_t kMaxGroups = 65536;

/// How the gradient becomes its clipped mean, for kernels. A step whose norm says that a gradient
/// is not finite changes nothing and does not count.
struct ClipCuda {
  double mean_scale;
  double clip;               ///< used when `norm` is undefined
  engine::Tensor norm;       ///< (2) i32: GradNorm::on_device()
  double max_norm;           ///< with `norm`: 0 means no clipping
  engine::Tensor num_steps;  ///< (1) i32, counts up
};

/// What one group has for itself. On the device a row of a table, by its bits.
struct GroupRates {
  double lr_scale = 1;  ///< times the learning rate of the step, then rounded to f32
  double weight_decay = 0;

  friend bool operator==(const GroupRates&, const GroupRates&) = default;
};

/// The f64 learning rates of a step. The groups', and that of a step that is captured, are read on
/// the device when it runs.
struct RatesCuda {
  engine::Tensor table;  ///< i64 bits of f64: a learning rate, and GroupRates of each group
  double lr = 0;
  bool reads_lr = false;  ///< instead of `lr` that of the table
  std::int64_t num_groups() const { return (table.numel() - 1) / 2; }
};

/// What is updated: f32 tensors of equal size.
struct UpdatedCuda {
  engine::Tensor master, grad_sum;
  engine::Tensor tiles;   ///< rows of Tile, that count from their first elements
  engine::Tensor groups;  ///< i32 of each parameter; -1: left as it is
};

/// The kernels of one rule; defined in rule_kernels.cuh, where CUDA is built.
template <class Rule>
struct RuleKernels {
  /// Bytes of what a step needs on the device.
  static std::int64_t step_nbytes(std::int64_t num_groups);
  static void prepare(const engine::Stream& stream, const engine::Tensor& step, const Rule& rule,
                      const ClipCuda& clip, const RatesCuda& rates);
  /// `states`: addresses of as many f32, null for a state that is not kept.
  static void update(const engine::Stream& stream, const engine::Tensor& step,
                     const UpdatedCuda& updated,
                     const std::array<float*, Rule::kNumStates>& states);
};

}  // namespace tessera::shard

// The CUDA side of an optimizer's rule; see rule_optimizer.h. Light enough for nvcc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// Groups of parameters that one optimizer can have.
inline constexpr std::size_t kMaxGroups = 16;

/// How the gradient becomes its clipped mean, for kernels. A step whose norm says that a gradient
/// is not finite changes nothing and does not count.
struct ClipCuda {
  double mean_scale;
  double clip;               ///< used when `norm` is undefined
  engine::Tensor norm;       ///< (2) i32: GradNorm::on_device()
  double max_norm;           ///< with `norm`: 0 means no clipping
  engine::Tensor num_steps;  ///< (1) i32, counts up
};

/// Learning rate, rounded to f32, and decay of each group.
struct GroupsCuda {
  int count = 0;
  double lr[kMaxGroups] = {};
  double weight_decay[kMaxGroups] = {};
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
  static std::int64_t step_nbytes();
  /// `groups_on_gpu`: read when it runs, instead of `groups`; undefined: none.
  static void prepare(const engine::Stream& stream, const engine::Tensor& step, const Rule& rule,
                      const ClipCuda& clip, const GroupsCuda& groups,
                      const engine::Tensor& groups_on_gpu);
  /// `states`: addresses of as many f32, null for a state that is not kept.
  static void update(const engine::Stream& stream, const engine::Tensor& step,
                     const UpdatedCuda& updated,
                     const std::array<float*, Rule::kNumStates>& states);
};

}  // namespace tessera::shard

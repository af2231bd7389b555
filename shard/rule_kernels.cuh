// The kernels of an optimizer's rule: one launch a flat shard. What depends on the norm and the
// number of steps is worked out on the device, so that nobody waits for the host.
#pragma once

#include <algorithm>

#include "engine/cuda_launch.cuh"
#include "shard/rule_kernels.h"
#include "shard/segment_row.h"

namespace tessera::shard {

template <class Rule>
struct StepCuda {
  float scale;  // of the gradient sums
  bool skip;
  typename Rule::Step groups[kMaxGroups];
};

namespace rule_kernels {

// One thread. The clipping is that of clip_scale() in fsdp.cc.
template <class Rule>
__global__ void prepare_kernel(StepCuda<Rule>* step, Rule rule, const int* norm, double mean_scale,
                               double clip, double max_norm, int* num_steps, GroupsCuda groups) {
  if (norm != nullptr && max_norm > 0) {
    clip = fmin(1.0, max_norm / (static_cast<double>(__int_as_float(norm[0])) + 1e-6));
  }
  step->scale = static_cast<float>(mean_scale * clip);
  step->skip = norm != nullptr && norm[1] != 0;
  if (step->skip) return;
  const int count = ++*num_steps;
  for (int g = 0; g < groups.count; ++g) {
    step->groups[g] = rule.prepare(groups.lr[g], groups.weight_decay[g], count);
  }
}

template <class Rule>
struct States {
  float* data[Rule::kNumStates + 1];  // null: not kept
};

template <class Rule>
__device__ void update_element(const typename Rule::Step& step, float grad, float& p,
                               const States<Rule>& states, std::int64_t i) {
  float state[Rule::kNumStates + 1] = {};
  for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
    if (states.data[k] != nullptr) state[k] = states.data[k][i];
  }
  Rule::update(step, grad, p, state);
  for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
    if (states.data[k] != nullptr) states.data[k][i] = state[k];
  }
}

constexpr int kNumThreads = 256;
constexpr int kPerThread = 4;  // 16 bytes of each array

// A row of blocks for each segment. Segments start at multiples of 256 bytes in the flat parameter,
// shards may cut them anywhere: so a thread takes 4 neighbours if they are aligned.
template <class Rule>
__global__ void update_kernel(float* __restrict p, const float* __restrict g, States<Rule> states,
                              const SegmentRow* table, const int* groups,
                              const StepCuda<Rule>* step) {
  if (step->skip) return;
  const SegmentRow segment = table[blockIdx.y];
  if (groups[segment.parameter] < 0) return;
  const float scale = step->scale;
  const typename Rule::Step group = step->groups[groups[segment.parameter]];
  const auto run = [&](std::int64_t i) {
    update_element<Rule>(group, g[i] * scale, p[i], states, i);
  };
  const std::int64_t end = segment.begin + segment.numel;
  const std::int64_t aligned = (segment.begin + kPerThread - 1) / kPerThread * kPerThread;
  const std::int64_t thread = engine::stride_begin();
  if (thread == 0) {
    for (std::int64_t i = segment.begin; i < aligned && i < end; ++i) run(i);
  }
  for (std::int64_t i = aligned + thread * kPerThread; i < end;
       i += engine::stride_step() * kPerThread) {
    const std::int64_t last = i + kPerThread < end ? i + kPerThread : end;
    for (std::int64_t j = i; j < last; ++j) run(j);
  }
}

}  // namespace rule_kernels

template <class Rule>
std::int64_t RuleKernels<Rule>::step_nbytes() {
  return sizeof(StepCuda<Rule>);
}

template <class Rule>
void RuleKernels<Rule>::prepare(const engine::Stream& stream, const engine::Tensor& step,
                                const Rule& rule, const ClipCuda& clip, const GroupsCuda& groups) {
  engine::launch_kernel(
      stream, {.grid = dim3(1), .block = dim3(1)}, rule_kernels::prepare_kernel<Rule>,
      reinterpret_cast<StepCuda<Rule>*>(step.raw()), rule,
      clip.norm.defined() ? clip.norm.data<std::int32_t>() : nullptr, clip.mean_scale, clip.clip,
      clip.max_norm, clip.num_steps.data<std::int32_t>(), groups);
}

template <class Rule>
void RuleKernels<Rule>::update(const engine::Stream& stream, const engine::Tensor& step,
                               const UpdatedCuda& updated,
                               const std::array<float*, Rule::kNumStates>& states) {
  rule_kernels::States<Rule> kept{};
  std::copy(states.begin(), states.end(), kept.data);
  const auto* rows = reinterpret_cast<const SegmentRow*>(updated.segment_table.raw());
  const std::int64_t num_rows = updated.segment_table.dim(0);
  // As many blocks a row as the whole shard could fill.
  engine::LaunchShape shape = engine::stride_shape(
      (updated.master.numel() + rule_kernels::kPerThread - 1) / rule_kernels::kPerThread,
      rule_kernels::kNumThreads);
  for (std::int64_t row = 0; row < num_rows; row += kMaxSegmentRows) {
    shape.grid.y = static_cast<unsigned>(std::min(num_rows - row, kMaxSegmentRows));
    engine::launch_kernel(stream, shape, rule_kernels::update_kernel<Rule>,
                          updated.master.data<float>(), updated.grad_sum.data<float>(), kept,
                          rows + row, updated.groups.data<std::int32_t>(),
                          reinterpret_cast<const StepCuda<Rule>*>(step.raw()));
  }
}

}  // namespace tessera::shard

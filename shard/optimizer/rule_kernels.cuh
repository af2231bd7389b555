// The kernels of an optimizer's rule: one launch a flat shard. What depends on the norm and the
// number of steps is worked out on the device, so that nobody waits for the host.
#pragma once

#include <algorithm>

#include "engine/cuda_launch.cuh"
#include "shard/optimizer/rule_kernels.h"
#include "shard/tile.cuh"

namespace tessera::shard {

// Before what each group has: a Rule::Step.
template <class Rule>
struct alignas(float) alignas(typename Rule::Step) StepCuda {
  float scale;  // of the gradient sums
  bool skip;
};

namespace rule_kernels {

template <class Rule>
__device__ typename Rule::Step* groups_of(StepCuda<Rule>* step) {
  return reinterpret_cast<typename Rule::Step*>(step + 1);
}
template <class Rule>
__device__ const typename Rule::Step* groups_of(const StepCuda<Rule>* step) {
  return reinterpret_cast<const typename Rule::Step*>(step + 1);
}

constexpr int kPrepareThreads = 256;

// One block; each thread takes some groups. The clipping is that of clip_scale() in grad_norm.cc.
template <class Rule>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(StepCuda<Rule>* step, Rule rule, const int* norm, double mean_scale, double clip,
                   double max_norm, int* num_steps, double lr, bool reads_lr, const double* table,
                   std::int64_t num_groups) {
  const bool skip = norm != nullptr && norm[1] != 0;
  const int count = *num_steps + 1;
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) {
    if (norm != nullptr && max_norm > 0) {
      clip = fmin(1.0, max_norm / (static_cast<double>(__int_as_float(norm[0])) + 1e-6));
    }
    step->scale = static_cast<float>(mean_scale * clip);
    step->skip = skip;
    if (!skip) *num_steps = count;
  }
  if (skip) return;
  if (reads_lr) lr = table[0];
  for (std::int64_t g = threadIdx.x; g < num_groups; g += kPrepareThreads) {
    const double rate{static_cast<float>(lr * table[1 + 2 * g])};
    groups_of(step)[g] = rule.prepare(rate, table[2 + 2 * g], count);
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

// Updates 4 neighbours, by 16 bytes.
template <class Rule>
__device__ void update_quad(const typename Rule::Step& step, const float* g, float scale, float* p,
                            const States<Rule>& states, std::int64_t i) {
  using Quad = engine::Packed<float>;
  const Quad grad = Quad::load(g + i);
  Quad value = Quad::load(p + i);
  Quad kept[Rule::kNumStates + 1];
  for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
    kept[k] = states.data[k] != nullptr ? Quad::load(states.data[k] + i) : Quad{};
  }
  for (int j = 0; j < Quad::kNumel; ++j) {
    float state[Rule::kNumStates + 1] = {};
    for (std::size_t k = 0; k < Rule::kNumStates; ++k) state[k] = kept[k].values[j];
    Rule::update(step, grad.values[j] * scale, value.values[j], state);
    for (std::size_t k = 0; k < Rule::kNumStates; ++k) kept[k].values[j] = state[k];
  }
  value.store(p + i);
  for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
    if (states.data[k] != nullptr) kept[k].store(states.data[k] + i);
  }
}

constexpr std::int64_t kMaxBlocks = 2048;

// `is_packed`: all addresses are multiples of 16 bytes.
template <class Rule>
__global__ void __launch_bounds__(kTileThreads)
    update_kernel(float* __restrict p, const float* __restrict g, States<Rule> states,
                  const Tile* tiles, std::int64_t num_tiles, bool is_packed, const int* groups,
                  const StepCuda<Rule>* step) {
  if (step->skip) return;
  const float scale = step->scale;
  for (std::int64_t t = blockIdx.x; t < num_tiles; t += gridDim.x) {
    const Tile tile = tiles[t];
    const int index = groups[tile.parameter];
    if (index < 0) continue;
    const typename Rule::Step group = groups_of(step)[index];
    if (is_packed && is_full(tile)) {
      for (int turn = 0; turn < kTileTurns; ++turn) {
        update_quad<Rule>(group, g, scale, p, states, quad_begin(tile, turn));
      }
      continue;
    }
    for (std::int64_t i = tile.begin + threadIdx.x; i < tile.begin + tile.numel;
         i += kTileThreads) {
      update_element<Rule>(group, g[i] * scale, p[i], states, i);
    }
  }
}

}  // namespace rule_kernels

template <class Rule>
std::int64_t RuleKernels<Rule>::step_nbytes(std::int64_t num_groups) {
  return static_cast<std::int64_t>(sizeof(StepCuda<Rule>)) +
         num_groups * static_cast<std::int64_t>(sizeof(typename Rule::Step));
}

template <class Rule>
void RuleKernels<Rule>::prepare(const engine::Stream& stream, const engine::Tensor& step,
                                const Rule& rule, const ClipCuda& clip, const RatesCuda& rates) {
  engine::launch_kernel(
      stream, {.grid = dim3(1), .block = dim3(rule_kernels::kPrepareThreads)},
      rule_kernels::prepare_kernel<Rule>, reinterpret_cast<StepCuda<Rule>*>(step.raw()), rule,
      clip.norm.defined() ? clip.norm.data<std::int32_t>() : nullptr, clip.mean_scale, clip.clip,
      clip.max_norm, clip.num_steps.data<std::int32_t>(), rates.lr, rates.reads_lr,
      reinterpret_cast<const double*>(rates.table.raw()), rates.num_groups());
}

template <class Rule>
void RuleKernels<Rule>::update(const engine::Stream& stream, const engine::Tensor& step,
                               const UpdatedCuda& updated,
                               const std::array<float*, Rule::kNumStates>& states) {
  rule_kernels::States<Rule> kept{};
  std::copy(states.begin(), states.end(), kept.data);
  float* p = updated.master.data<float>();
  const float* g = updated.grad_sum.data<float>();
  const bool is_packed = engine::are_packable(p, g) && std::ranges::all_of(states, [](float* s) {
                           return engine::are_packable(s);
                         });
  engine::launch_kernel(stream, tile_shape(updated.tiles, rule_kernels::kMaxBlocks),
                        rule_kernels::update_kernel<Rule>, p, g, kept, tiles_in(updated.tiles),
                        updated.tiles.dim(0), is_packed, updated.groups.data<std::int32_t>(),
                        reinterpret_cast<const StepCuda<Rule>*>(step.raw()));
}

}  // namespace tessera::shard

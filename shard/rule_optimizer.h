// An optimizer from a rule that updates one element: the same function on the host and in CUDA
// kernels. A rule is a value like this one, f32 arithmetic throughout:
//
//   struct Lion {
//     double beta1 = 0.9, beta2 = 0.99;
//     static constexpr std::size_t kNumStates = 1;
//     struct Step { float lr, keep, beta1, beta2; };
//     // What all elements of a group share in one step.
//     constexpr Step prepare(double lr, double weight_decay, std::int64_t num_steps) const;
//     // p and the state of one element, from its gradient.
//     static constexpr void update(const Step& step, float grad, float& p, float* state);
//   };
//   shard::RuleOptimizer<Lion> optimizer(fsdp, Lion{}, {"m"}, {{.name = "all"}}, 0);
//
// For a build with CUDA one .cu file of yours includes the rule and shard/rule_kernels.cuh, and
// says `template struct tessera::shard::RuleKernels<Lion>;`. examples/own_optimizer.cc is such a
// program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "shard/optimizer.h"
#include "shard/rule_kernels.h"

namespace tessera::shard {

template <class Rule>
class RuleOptimizer : public Optimizer {
 public:
  using DefaultGroup = std::function<std::size_t(const engine::Parameter&)>;

  /// `state_names`: at most Rule::kNumStates; a state without a name is not kept and reads as 0.
  /// Parameters that no group lists are in group default_group(p). Throws as Optimizer does.
  RuleOptimizer(Fsdp& fsdp, Rule rule, std::vector<std::string> state_names,
                std::vector<ParameterGroup> groups, const DefaultGroup& default_group)
      : Optimizer(fsdp, std::move(state_names), std::move(groups), default_group),
        rule_(std::move(rule)) {
    if constexpr (engine::kCudaBuilt) {
      if (!fsdp.compute().device().is_cuda()) return;
      step_on_gpu_ =
          engine::Tensor::empty(fsdp.memory(), {RuleKernels<Rule>::step_nbytes()},
                                engine::DType::kU8, "optimizer.step", engine::Category::kOptimizer);
    }
  }
  ~RuleOptimizer() override { forget_early_update(); }

  /// The same with one group for all that no other lists.
  RuleOptimizer(Fsdp& fsdp, Rule rule, std::vector<std::string> state_names,
                std::vector<ParameterGroup> groups, std::size_t default_group = 0)
      : RuleOptimizer(fsdp, std::move(rule), std::move(state_names), std::move(groups),
                      [default_group](const engine::Parameter&) { return default_group; }) {}

 private:
  void prepare(const Step& step) override {
    steps_.clear();
    GroupsCuda on_gpu;
    for (const ParameterGroup& group : groups()) {
      const double lr{static_cast<float>(step.lr * group.lr_scale)};
      steps_.push_back(rule_.prepare(lr, group.weight_decay, step.num_steps));
      on_gpu.lr[on_gpu.count] = lr;
      on_gpu.weight_decay[on_gpu.count++] = group.weight_decay;
    }
    scale_ = static_cast<float>(step.mean_scale * step.clip);
    fsdp().compute().launch(
        {.name = "optimizer.prepare"}, [] {},
        [&](const auto& stream) {
          RuleKernels<Rule>::prepare(
              stream, step_on_gpu_, rule_,
              {step.mean_scale, step.clip, step.norm, step.max_norm, step.num_steps_on_gpu},
              on_gpu);
        });
  }

  void update(const Target& target, const engine::Stream& stream) override {
    const Flat& flat = target.flat;
    std::array<float*, Rule::kNumStates> states{};
    for (std::size_t i = 0; i < target.states.size(); ++i)
      states[i] = target.states[i].data<float>();
    const std::int64_t nbytes = flat.master.nbytes();
    const auto num_states = static_cast<std::int64_t>(target.states.size());
    stream.launch(
        {.name = "optimizer",
         .flops = 12.0 * static_cast<double>(flat.owned.numel),
         .bytes_read = (2 + num_states) * nbytes,
         .bytes_written = (1 + num_states) * nbytes,
         .detail = target.unit},
        [this, &flat, states, groups = target.groups] {
          for (const Segment& s : flat.segments) {
            if (groups[s.parameter] < 0) continue;
            update_segment(steps_[static_cast<std::size_t>(groups[s.parameter])],
                           flat.master.template data<float>() + s.shard_begin,
                           flat.grad_sum.template data<float>() + s.shard_begin, states,
                           s.shard_begin, s.numel);
          }
        },
        [&](const auto& cuda_stream) {
          if (flat.segments.empty()) return;
          RuleKernels<Rule>::update(cuda_stream, step_on_gpu_, flat, states, target.groups_on_gpu);
        });
  }

  void update_segment(const typename Rule::Step& step, float* p, const float* g,
                      std::array<float*, Rule::kNumStates> states, std::int64_t begin,
                      std::int64_t numel) const {
    const float scale = scale_;
    for (float*& state : states) state = state == nullptr ? nullptr : state + begin;
    const auto run = [&](auto keeps) {
#pragma GCC ivdep  // understood without -fopenmp-simd, in a consumer's build as well
      for (std::int64_t i = 0; i < numel; ++i) {
        float state[Rule::kNumStates + 1] = {};
        if constexpr (keeps) {
          for (std::size_t k = 0; k < Rule::kNumStates; ++k) state[k] = states[k][i];
        }
        Rule::update(step, g[i] * scale, p[i], state);
        if constexpr (keeps) {
          for (std::size_t k = 0; k < Rule::kNumStates; ++k) states[k][i] = state[k];
        }
      }
    };
    const bool keeps = Rule::kNumStates > 0 && states.back() != nullptr;
    keeps ? run(std::true_type{}) : run(std::false_type{});
  }

  Rule rule_;
  std::vector<typename Rule::Step> steps_;  // of each group
  float scale_ = 1;
  engine::Tensor step_on_gpu_;
};

}  // namespace tessera::shard

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
//   shard::RuleOptimizer<Lion> optimizer(fsdp, Lion{}, {"m"}, {{.name = "all"}});
//
// For a build with CUDA one .cu file of yours includes the rule and
// shard/optimizer/rule_kernels.cuh, and says `template struct tessera::shard::RuleKernels<Lion>;`.
// examples/lion.h and lion.cu are such a rule. Who has no nvcc includes rule_without_nvcc.h in
// place of the .cu file, for CPUs alone.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/optimizer/elementwise_optimizer.h"
#include "shard/optimizer/rule_kernels.h"

namespace tessera::shard {

template <class Rule>
class RuleOptimizer : public ElementwiseOptimizer {
 public:
  using DefaultGroup = std::function<std::size_t(const engine::Parameter&)>;

  /// `state_names`: at most Rule::kNumStates; a state without a name is not kept and reads as 0.
  /// Parameters that no group lists are in group default_group(p), or in the first. `updates`: as
  /// of OptimizerTraits. Throws as Optimizer does.
  RuleOptimizer(Fsdp& fsdp, Rule rule, std::vector<std::string> state_names,
                std::vector<ParameterGroup> groups, const DefaultGroup& default_group = {},
                std::function<bool(const engine::Parameter&)> updates = {})
      : ElementwiseOptimizer(fsdp, {.states = std::move(state_names),
                                    .groups = std::move(groups),
                                    .default_group = default_group,
                                    .updates = std::move(updates)}),
        rule_(std::move(rule)) {
    if constexpr (engine::kCudaBuilt) {
      if (!fsdp.compute().device().is_cuda()) return;
      const std::int64_t num_groups = std::ssize(this->groups());
      step_on_gpu_ =
          engine::Tensor::empty(fsdp.memory(), {RuleKernels<Rule>::step_nbytes(num_groups)},
                                engine::DType::kU8, "optimizer.step", engine::Category::kOptimizer);
      stored_ = group_rates();
      rates_on_gpu_ = engine::Tensor::from<std::int64_t>(fsdp.memory(), {1 + 2 * num_groups},
                                                         words_of(*stored_), "optimizer.rates",
                                                         engine::Category::kOptimizer);
    }
  }
  ~RuleOptimizer() override { end_updates(); }

 private:
  // What the host updates with.
  struct Prepared {
    std::vector<typename Rule::Step> groups;  // of each group
    float scale = 1;                          // of the gradient sums
    bool skips = false;
  };

  void prepare_parts(const Step& step, const HostPart* host) override {
    const auto prepared = std::make_shared<Prepared>();
    prepared_ = prepared;
    const auto prepare_on_host = [rule = rule_, lr = step.lr, groups = step.groups, prepared,
                                  mean_scale = step.mean_scale](const HostStep& on_host) {
      prepared->skips = on_host.skips;
      if (on_host.skips) return;
      prepared->scale = static_cast<float>(mean_scale * on_host.clip);
      prepared->groups.reserve(groups->size());
      for (const GroupRates& group : *groups) {
        const double rate{static_cast<float>(lr * group.lr_scale)};
        prepared->groups.push_back(rule.prepare(rate, group.weight_decay, on_host.num_steps));
      }
    };
    if (!fsdp().compute().device().is_cuda()) {
      prepare_on_host({.skips = false, .clip = step.clip, .num_steps = step.num_steps});
    } else if (host != nullptr) {
      host->stream.launch({.name = "optimizer.prepare"}, [prepare_on_host, host_step = host->step] {
        prepare_on_host(host_step());
      });
    }
    // What a graph repeats must not write over what set_rates() wrote.
    if (!step.is_captured) store_groups(step.groups);
    fsdp().compute().launch(
        {.name = "optimizer.prepare"}, [] {},
        [&](const auto& stream) {
          RuleKernels<Rule>::prepare(
              stream, step_on_gpu_, rule_,
              {step.mean_scale, step.clip, step.norm ? step.norm->on_device() : engine::Tensor(),
               step.max_norm, num_steps_on_gpu()},
              {.table = rates_on_gpu_, .lr = step.lr, .reads_lr = step.is_captured});
        });
  }

  void set_rates(double lr) override {
    engine::require(rates_on_gpu_.defined(),
                    "[optimizer] expected a GPU to repeat a captured step on, got {}",
                    to_string(fsdp().compute().device()));
    store_groups(group_rates());
    engine::launch_store(fsdp().compute(), rates_on_gpu_.slice(0, {1}),
                         std::as_bytes(std::span(&lr, 1)), "optimizer.rates");
  }

  // Bits of a learning rate, not set, and of `rates`.
  static std::vector<std::int64_t> words_of(const std::vector<GroupRates>& rates) {
    std::vector<std::int64_t> words = {0};
    for (const GroupRates& group : rates) {
      const auto row = std::bit_cast<std::array<std::int64_t, 2>>(group);
      words.insert(words.end(), row.begin(), row.end());
    }
    return words;
  }

  // As work of the compute stream, if they have changed since the last time.
  void store_groups(const std::shared_ptr<const std::vector<GroupRates>>& rates) {
    if (!rates_on_gpu_.defined() || rates == stored_) return;
    stored_ = rates;
    constexpr std::size_t kRows = 64;  // as much as one launch takes
    for (std::size_t begin = 0; begin < rates->size(); begin += kRows) {
      const std::span<const GroupRates> rows =
          std::span(*rates).subspan(begin, std::min(kRows, rates->size() - begin));
      engine::launch_store(
          fsdp().compute(),
          rates_on_gpu_.slice(static_cast<std::int64_t>(1 + 2 * begin), {2 * std::ssize(rows)}),
          std::as_bytes(rows), "optimizer.groups");
    }
  }

  void update(const Target& target, const engine::Stream& stream) override {
    std::array<float*, Rule::kNumStates> states{};
    for (std::size_t i = 0; i < target.states.size(); ++i)
      states[i] = target.states[i].template data<float>();
    const std::int64_t nbytes = target.master.nbytes();
    const auto num_states = static_cast<std::int64_t>(target.states.size());
    stream.launch(
        {.name = "optimizer",
         .flops = 12.0 * static_cast<double>(target.master.numel()),
         .bytes_read = (2 + num_states) * nbytes,
         .bytes_written = (1 + num_states) * nbytes,
         .detail = target.unit},
        [prepared = prepared_, states, p = target.master.template data<float>(),
         g = target.grad_sum.template data<float>(), segments = target.segments,
         groups = target.groups] {
          if (prepared->skips) return;
          for (const Segment& s : segments) {
            const std::int32_t group = (*groups)[s.parameter];
            if (group < 0) continue;
            update_segment(*prepared, static_cast<std::size_t>(group), p + s.shard_begin,
                           g + s.shard_begin, states, s.shard_begin, s.numel);
          }
        },
        [&](const auto& cuda_stream) {
          if (target.segments.empty()) return;
          RuleKernels<Rule>::update(
              cuda_stream, step_on_gpu_,
              {target.master, target.grad_sum, target.tiles, target.groups_on_gpu}, states);
        });
  }

  static void update_segment(const Prepared& prepared, std::size_t group, float* p, const float* g,
                             std::array<float*, Rule::kNumStates> states, std::int64_t begin,
                             std::int64_t numel) {
    const typename Rule::Step step = prepared.groups[group];
    const float scale = prepared.scale;
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
  std::shared_ptr<const Prepared> prepared_;
  engine::Tensor step_on_gpu_;
  engine::Tensor rates_on_gpu_;                                 // RatesCuda::table
  std::shared_ptr<const std::vector<GroupRates>> stored_ = {};  // in it
};

}  // namespace tessera::shard

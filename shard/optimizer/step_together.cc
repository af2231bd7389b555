#include "shard/optimizer/step_together.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {

using engine::require;

void Optimizer::run_together(std::vector<std::pair<Optimizer*, Step>> steps) {
  Fsdp& fsdp = steps.front().first->fsdp_;
  std::string text;
  bool skips = false;
  for (const auto& [optimizer, step] : steps) {
    text += (text.empty() ? "" : "; ") + optimizer->describe(step);
    skips = skips || step.skips;
  }
  fsdp.take_gradients(text, skips);
  for (auto& [optimizer, step] : steps) optimizer->prepare_step(std::move(step));
  for (Unit* unit : fsdp.update_order()) {
    bool is_updated = false;
    for (const auto& [optimizer, step] : steps) {
      is_updated |= optimizer->update_slot(*unit, fsdp.compute(), /*renews=*/false);
    }
    if (is_updated) fsdp.updated(*unit, fsdp.compute());
  }
  for (const auto& [optimizer, step] : steps) optimizer->step_ = {};
  fsdp.prefetch_forward();
}

/// A friend of Optimizer.
struct TogetherStep {
  // `step_of` makes the step of one of them.
  template <class F>
  static void run(const std::vector<OptimizerStep>& all, const F& step_of) {
    check(all);
    if (all.size() == 1) {  // which may have parts of its own on the host
      Optimizer& one = *all.front().optimizer;
      one.begin_step(step_of(one, all.front().lr));
      return one.step_units();
    }
    std::vector<std::pair<Optimizer*, Optimizer::Step>> steps;
    for (const auto& [optimizer, lr] : all) {
      optimizer->check_can_capture();
      steps.emplace_back(optimizer, step_of(*optimizer, lr));
    }
    Optimizer::run_together(std::move(steps));
  }

  static void check(const std::vector<OptimizerStep>& all) {
    require(!all.empty(), "[optimizer] expected optimizers to step together, got none");
    const Fsdp& fsdp = all.front().optimizer->fsdp_;
    for (const OptimizerStep& step : all) {
      require(&step.optimizer->fsdp_ == &fsdp,
              "[optimizer] expected optimizers of one Fsdp to step together, got two");
    }
    require(fsdp.offload() == nullptr || all.size() == 1,
            "[optimizer] expected nothing offloaded with several optimizers");
    for (const auto& unit : fsdp.units()) {
      const Flat* flat = unit->trainable();
      for (std::size_t i = 0; flat != nullptr && i < flat->parameters.size(); ++i) {
        const auto num = std::ranges::count_if(all, [&](const OptimizerStep& step) {
          const auto& slots = step.optimizer->slots_;
          return std::ranges::find(slots, flat, &Optimizer::Slot::flat)->groups[i] >= 0;
        });
        require(num == 1, "[optimizer] expected one optimizer of each parameter, got {} ({})", num,
                flat->parameters[i]->name);
      }
    }
  }

  template <class Norm>
  static Optimizer::Step of(const Optimizer& optimizer, double lr, const Norm& norm,
                            double max_norm) {
    return optimizer.step_of(lr, norm, max_norm);
  }
  static Optimizer::Step of(double lr, ClipFactor clip) { return {.lr = lr, .clip = clip.value}; }
};

void step_together(const std::vector<OptimizerStep>& steps, const GradNorm& norm, double max_norm) {
  TogetherStep::run(steps, [&](const Optimizer& optimizer, double lr) {
    return TogetherStep::of(optimizer, lr, norm, max_norm);
  });
}

void step_together(const std::vector<OptimizerStep>& steps, const JointNorm& norm,
                   double max_norm) {
  TogetherStep::run(steps, [&](const Optimizer& optimizer, double lr) {
    return TogetherStep::of(optimizer, lr, norm, max_norm);
  });
}

void step_together(const std::vector<OptimizerStep>& steps, ClipFactor clip) {
  TogetherStep::run(steps, [&](const Optimizer&, double lr) { return TogetherStep::of(lr, clip); });
}

}  // namespace tessera::shard

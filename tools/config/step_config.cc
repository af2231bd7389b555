#include "tools/config/step_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/error.h"

namespace tessera::tools {

using engine::require;

namespace {

constexpr std::int64_t kMaxBlocks = 1'000'000;

}  // namespace

void StepConfig::add_to(FlagSet& flags) {
  constexpr double kHuge = 1e30;
  flags.add("train.steps", &steps, {.help = "optimizer steps", .min = 0});
  flags.add("train.batch", &batch,
            {.help = "samples per rank and micro-step", .min = 1, .max = 1 << 24});
  flags.add("train.accum", &accum, {.help = "micro-steps per step", .min = 1, .max = 1 << 20});
  flags.add("train.accum_comm", &accum_comm,
            EnumOption<AccumComm>{"reduce gradients every micro-step, or at the last",
                                  {{"every", AccumComm::kEvery}, {"last", AccumComm::kLast}}});
  flags.add("train.seed", &seed,
            {.help = "of initial parameters, data order and dropout", .min = 0});
  flags.add(
      "train.optimizer", &optimizer,
      EnumOption<OptimizerKind>{"AdamW, or SGD: v = momentum v + g; p -= lr v",
                                {{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}});
  flags.add("train.lr", &lr, {.help = "peak learning rate", .min = 0, .max = kHuge});
  flags.add("train.momentum", &momentum,
            {.help = "of sgd", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("train.weight_decay", &weight_decay,
            {.help = "of adamw, on tensors of two or more dimensions", .min = 0, .max = kHuge});
  flags.add("train.beta1", &beta1,
            {.help = "of adamw", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("train.beta2", &beta2,
            {.help = "of adamw", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("train.eps", &eps,
            {.help = "of adamw", .min = 0, .max = kHuge, .above_min = true, .is_f32 = true});
  flags.add("train.overlap_optimizer", &overlap_optimizer,
            EnumOption<OverlapOptimizer>{
                "update parameters as soon as their gradient is final, while backward goes on; "
                "where each rank updates a part of whole parameters (zero1, zero2, hybrids) the "
                "parts are gathered after the last reduction (backward) or at once (interleaved); "
                "not with train.grad_clip",
                {{"none", OverlapOptimizer::kNone},
                 {"backward", OverlapOptimizer::kBackward},
                 {"interleaved", OverlapOptimizer::kInterleaved}}});
  flags.add("train.grad_clip", &grad_clip,
            {.help = "largest norm of the gradient; 0: off", .min = 0, .max = kHuge});
  flags.add("train.max_skips", &max_skips,
            {.help = "updates in a row that are skipped because a gradient is not finite; one more "
                     "ends the run",
             .min = 0});
  flags.add("train.check_gradients", &check_gradients,
            {.help = "look for what is not finite on each rank before gradients are reduced, so "
                     "that messages name the rank and the micro-step that was reduced too"});
  flags.add("train.warmup", &warmup,
            {.help = "steps of linear warmup of the learning rate", .min = 0});
  flags.add("train.schedule", &schedule,
            EnumOption<ScheduleKind>{"of the learning rate after warmup; to 0 at train.steps",
                                     {{"constant", ScheduleKind::kConstant},
                                      {"cosine", ScheduleKind::kCosine},
                                      {"linear", ScheduleKind::kLinear}}});
  flags.add(
      "train.spike_factor", &spike_factor,
      {.help = "a step whose loss is over that many times the median of the last 32, or not "
               "finite, is made again from the same state before it is believed: with another "
               "result the machine has failed and training goes on, with the same it ends, "
               "before the update, with a checkpoint if any are saved; 0: off",
       .min = 0,
       .max = kHuge});
  flags.add("train.verify_every", &verify_every,
            {.help = "steps between those that are made again from the same state and compared bit "
                     "by bit, as a check of the machine; 0: off",
             .min = 0});
  flags.add("train.max_minutes", &max_minutes,
            {.help = "end after the step at which training has taken that long, as a signal would "
                     "end it, with a checkpoint if any are saved; 0: no limit",
             .min = 0,
             .max = 1e6});
  flags.add_switch("train.recompute", &recompute.blocks,
                   "keep no activations of a block, and run its forward again in backward: every "
                   "block, none, or the first so many",
                   kMaxBlocks);
}

void StepConfig::validate(const FlagSet& flags) const {
  const StepConfig defaults;
  const bool is_sgd = optimizer == OptimizerKind::kSgd;
  const auto refuse = [&](const char* name, double value, double initial, const char* owner) {
    require(value == initial && !flags.is_given(name),
            "[config] expected {} with train.optimizer={} only, got {} with another", name, owner,
            value);
  };
  if (is_sgd) {
    refuse("train.beta1", beta1, defaults.beta1, "adamw");
    refuse("train.beta2", beta2, defaults.beta2, "adamw");
    refuse("train.eps", eps, defaults.eps, "adamw");
    if (weight_decay != 0) {
      refuse("train.weight_decay", weight_decay, defaults.weight_decay, "adamw");
    }
  } else {
    refuse("train.momentum", momentum, defaults.momentum, "sgd");
  }
  require(
      overlap_optimizer == OverlapOptimizer::kNone || grad_clip == 0,
      "[config] expected train.grad_clip=0 with train.overlap_optimizer, got {}: the norm of the "
      "gradient is known when backward has ended, and most is updated by then",
      grad_clip);
  require(overlap_optimizer == OverlapOptimizer::kNone || max_skips == 0,
          "[config] expected train.max_skips=0 with train.overlap_optimizer, got {}: what is not "
          "finite is known when backward has ended, and most is updated by then",
          max_skips);
  if (!guards()) return;
  require(spike_factor == 0 || spike_factor > 1,
          "[config] expected train.spike_factor above 1, got {}", spike_factor);
  require(overlap_optimizer == OverlapOptimizer::kNone,
          "[config] expected train.overlap_optimizer=none with {}, got another: what is updated "
          "during backward cannot be made again",
          guarding_option());
}

const char* StepConfig::guarding_option() const {
  return spike_factor > 0 ? "train.spike_factor" : "train.verify_every";
}

double StepConfig::lr_at(std::int64_t step) const {
  if (step < warmup) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const double progress = static_cast<double>(step - warmup) /
                          static_cast<double>(std::max<std::int64_t>(steps - warmup, 1));
  switch (schedule) {
    case ScheduleKind::kConstant:
      return lr;
    case ScheduleKind::kCosine:
      return lr * 0.5 * (1 + std::cos(std::numbers::pi * progress));
    case ScheduleKind::kLinear:
      return lr * (1 - progress);
  }
  return lr;
}

}  // namespace tessera::tools

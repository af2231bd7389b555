#include "tools/config/comm_config.h"

#include <array>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {

using engine::DType;
using engine::require;

namespace {

constexpr std::array kPowerSgdFlags = {"powersgd.rank",
                                       "powersgd.start_step",
                                       "powersgd.error_feedback",
                                       "powersgd.error_dtype",
                                       "powersgd.offload_error",
                                       "powersgd.warm_start",
                                       "powersgd.across_replicas",
                                       "powersgd.min_compression_rate",
                                       "powersgd.orthogonalize_eps",
                                       "powersgd.seed"};

}  // namespace

void CommConfig::add_to(FlagSet& flags) {
  constexpr double kHuge = 1e30;
  flags.add("comm.hook", &hook,
            {.help = "what becomes of gradients on their way: none; rounded to bf16 or f16 on the "
                     "wire; compressed by PowerSGD, each parameter or a whole unit (batched), also "
                     "with a wire around; noop: NOT SENT AT ALL, so ranks train apart: to measure "
                     "what communication costs, never to train",
             .choices = shard::hook_names()});
  flags.add("powersgd.rank", &powersgd.low_rank.rank,
            {.help = "columns of the matrices that are sent for a gradient", .min = 1});
  flags.add("powersgd.start_step", &powersgd.start_step,
            {.help = "steps before the first that compresses", .min = 0});
  flags.add("powersgd.error_feedback", &powersgd.error_feedback,
            {.help = "what compression leaves is added to the next gradient; every rank remembers "
                     "it, as much as the compressed parameters"});
  flags.add("powersgd.error_dtype", &powersgd.error_dtype,
            EnumOption<DType>{"dtype of what powersgd.error_feedback remembers",
                              {{"f32", DType::kF32}, {"bf16", DType::kBF16}}});
  flags.add("powersgd.offload_error", &powersgd.offload_error,
            {.help = "what powersgd.error_feedback remembers lies in the host's memory, and is "
                     "copied for each reduction"});
  flags.add("powersgd.warm_start", &powersgd.warm_start,
            {.help = "start from the directions of the last step, not from random ones"});
  flags.add(
      "powersgd.min_compression_rate", &powersgd.low_rank.min_compression_rate,
      {.help = "compress what becomes smaller by more than this factor", .min = 0, .max = kHuge});
  flags.add("powersgd.orthogonalize_eps", &powersgd.orthogonalize_eps,
            {.help = "added to norms that PowerSGD divides columns by", .min = 0, .max = kHuge});
  flags.add("powersgd.seed", &powersgd.seed,
            {.help = "of the random directions that PowerSGD starts from", .min = 0});
  flags.add("powersgd.across_replicas", &powersgd.across_replicas,
            {.help = "of hsdp, hybrid_zero2 and hfsdp: compress between replicas alone; ranks then "
                     "remember what it leaves of their shard"});
}

void CommConfig::validate(const FlagSet& flags, const std::string& strategy,
                          const shard::Precision& precision, double grad_clip,
                          std::int64_t max_skips) const {
  const bool compresses = options().compresses();
  for (const char* name : kPowerSgdFlags) {
    require(compresses || !flags.is_given(name),
            "[config] expected {} with a comm.hook of PowerSGD only, got it with comm.hook={}",
            name, hook);
  }
  require(
      hook == "none" || precision.reduce == DType::kF32,
      "[config] expected precision.reduce=f32 with a comm.hook, which says itself what is sent, "
      "got {} with comm.hook={}",
      engine::name_of(precision.reduce), hook);
  const shard::Placement placement = shard::Placement::preset(strategy);
  require(
      !powersgd.across_replicas || placement.is_hybrid(),
      "[config] expected powersgd.across_replicas with hsdp, hybrid_zero2 or hfsdp only, got it "
      "with parallel.strategy={}",
      strategy);
  const bool all_know_the_norm =
      placement.optimizer == shard::Place::kWorld ||
      (placement.optimizer == shard::Place::kShard && !placement.is_hybrid());
  require(hook != "noop" || (grad_clip == 0 && max_skips == 0) || all_know_the_norm,
          "[config] expected train.grad_clip=0 and train.max_skips=0 with comm.hook=noop and "
          "parallel.strategy={}, got {} and {}: ranks have gradients of their own there, and would "
          "clip them by other norms, or skip other steps",
          strategy, grad_clip, max_skips);
  require(
      powersgd.error_feedback || (!powersgd.offload_error && powersgd.error_dtype == DType::kF32),
      "[config] expected powersgd.offload_error and powersgd.error_dtype with "
      "powersgd.error_feedback only: there is no error to remember");
}

shard::HookOptions CommConfig::options() const {
  shard::HookOptions options{.powersgd = powersgd};
  set_hook(options, hook);
  return options;
}

std::string CommConfig::text() const { return hook == "none" ? "" : describe(options()); }

}  // namespace tessera::tools

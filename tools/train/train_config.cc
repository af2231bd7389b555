#include "tools/train/train_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numbers>
#include <system_error>

#include "engine/error.h"

namespace tessera::tools {

using engine::DType;
using engine::IoError;
using engine::require;

namespace {

constexpr std::int64_t kMaxRanks = 1024;

}  // namespace

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

std::string data_path(const std::string& option, const std::string& supplied,
                      std::string_view how_to_get) {
  if (!option.empty()) return resolve_user_path(option);
  std::error_code ignored;
  require<IoError>(std::filesystem::exists(supplied, ignored),
                   "[data.path] expected a path, or to be started by `bazel run`, which supplies "
                   "{}, got neither; {}",
                   supplied, how_to_get);
  return supplied;
}

void TrainConfig::add_to(FlagSet& flags) {
  constexpr double kHuge = 1e30;
  flags.add("device", &device,
            EnumOption<DeviceChoice>{"what computes; auto: cuda where there is a GPU, else cpu",
                                     {{"auto", DeviceChoice::kAuto},
                                      {"cpu", DeviceChoice::kCpu},
                                      {"cuda", DeviceChoice::kCuda}}});
  flags.add("parallel.ranks", &parallel.ranks,
            {.help = fmt::format("ranks, one thread each, which take the GPUs in turn; 0: one a "
                                 "GPU, or {} on the CPU",
                                 parallel.cpu_ranks),
             .min = 0,
             .max = kMaxRanks});
  flags.add("parallel.backend", &parallel.backend,
            EnumOption<BackendChoice>{
                "what moves tensors between ranks: threads alone, on the CPU and on GPUs, or nccl, "
                "which needs a GPU for each; auto: nccl where every rank of several has its own",
                {{"auto", BackendChoice::kAuto},
                 {"threads", BackendChoice::kThreads},
                 {"nccl", BackendChoice::kNccl}}});
  flags.add("parallel.canonical", &parallel.canonical,
            {.help = "nccl sums in the order of ranks, as threads always do: the same bits however "
                     "many GPUs, for more traffic"});
  flags.add("parallel.strategy", &parallel.strategy,
            {.help = "what is sharded between uses; zero3 = full_shard = fsdp",
             .choices = shard::Placement::preset_names()});
  flags.add("parallel.prefetch", &parallel.prefetch,
            {.help = "units gathered ahead of use", .min = 0, .max = 1024});
  flags.add("parallel.reshard_after_forward", &parallel.reshard_after_forward,
            {.help = "give gathered parameters back between forward and backward; auto: as the "
                     "strategy says",
             .choices = {"auto", "true", "false"}});
  flags.add("parallel.unit_min_numel", &parallel.unit_min_numel,
            {.help = "pack neighbouring blocks until a unit has this many parameters", .min = 0});
  flags.add("parallel.deadline_s", &parallel.deadline_s,
            {.help = "how long a rank waits for the others, in seconds",
             .min = 0,
             .max = 86400,
             .above_min = true});
  const auto precision_flag = [&](const char* name, DType* field, const char* help) {
    flags.add(name, field, EnumOption<DType>{help, {{"f32", DType::kF32}, {"bf16", DType::kBF16}}});
  };
  precision_flag("precision.param", &precision.param,
                 "parameters on the wire and in compute; masters are f32");
  precision_flag("precision.reduce", &precision.reduce,
                 "each micro-step's gradient on the wire; sums are f32");
  precision_flag("precision.accumulate", &precision.accumulate,
                 "what backward accumulates gradients into");
  flags.add("train.steps", &train.steps, {.help = "optimizer steps", .min = 0});
  flags.add("train.batch", &train.batch,
            {.help = "samples per rank and micro-step", .min = 1, .max = 1 << 24});
  flags.add("train.accum", &train.accum,
            {.help = "micro-steps per step", .min = 1, .max = 1 << 20});
  flags.add("train.accum_comm", &train.accum_comm,
            EnumOption<shard::Communicate>{"reduce gradients every micro-step, or at the last",
                                           {{"every", shard::Communicate::kEveryMicroStep},
                                            {"last", shard::Communicate::kLastMicroStep}}});
  flags.add("train.seed", &train.seed,
            {.help = "of initial parameters, data order and dropout", .min = 0});
  flags.add(
      "train.optimizer", &train.optimizer,
      EnumOption<OptimizerKind>{"AdamW, or SGD: v = momentum v + g; p -= lr v",
                                {{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}});
  flags.add("train.lr", &train.lr, {.help = "peak learning rate", .min = 0, .max = kHuge});
  flags.add("train.momentum", &train.momentum,
            {.help = "of sgd", .min = 0, .max = 1, .below_max = true});
  flags.add("train.weight_decay", &train.weight_decay,
            {.help = "of adamw, on tensors of two or more dimensions", .min = 0, .max = kHuge});
  flags.add("train.beta1", &train.beta1,
            {.help = "of adamw", .min = 0, .max = 1, .below_max = true});
  flags.add("train.beta2", &train.beta2,
            {.help = "of adamw", .min = 0, .max = 1, .below_max = true});
  flags.add("train.eps", &train.eps,
            {.help = "of adamw", .min = 0, .max = kHuge, .above_min = true});
  flags.add("train.grad_clip", &train.grad_clip,
            {.help = "largest norm of the gradient; 0: off", .min = 0, .max = kHuge});
  flags.add("train.warmup", &train.warmup,
            {.help = "steps of linear warmup of the learning rate", .min = 0});
  flags.add("train.schedule", &train.schedule,
            EnumOption<ScheduleKind>{"of the learning rate after warmup; to 0 at train.steps",
                                     {{"constant", ScheduleKind::kConstant},
                                      {"cosine", ScheduleKind::kCosine},
                                      {"linear", ScheduleKind::kLinear}}});
  flags.add("train.recompute", &train.recompute,
            {.help = "keep no activations of a block; run its forward again in backward"});
  flags.add("log.every", &log.every,
            {.help = "steps between lines on the terminal; 0: none", .min = 0});
  flags.add("log.val_every", &log.val_every,
            {.help = "steps between validations; 0: at the end only", .min = 0});
  flags.add("log.jsonl", &log.jsonl,
            {.help = "file of one JSON line a step; empty: log.jsonl in the output folder"});
  flags.add("out", &out, {.help = "folder for everything written, made if need be"});
}

void TrainConfig::validate(const FlagSet& flags) const {
  const StepConfig defaults;
  const bool is_sgd = train.optimizer == OptimizerKind::kSgd;
  const auto refuse = [&](const char* name, double value, double initial, const char* owner) {
    require(value == initial && !flags.is_given(name),
            "[config] expected {} with train.optimizer={} only, got {} with another", name, owner,
            value);
  };
  if (is_sgd) {
    refuse("train.beta1", train.beta1, defaults.beta1, "adamw");
    refuse("train.beta2", train.beta2, defaults.beta2, "adamw");
    refuse("train.eps", train.eps, defaults.eps, "adamw");
    if (train.weight_decay != 0) {
      refuse("train.weight_decay", train.weight_decay, defaults.weight_decay, "adamw");
    }
  } else {
    refuse("train.momentum", train.momentum, defaults.momentum, "sgd");
  }
  require(parallel.strategy != "ddp" || parallel.reshard_after_forward != "true",
          "[config] expected parallel.reshard_after_forward=true with sharded parameters only, got "
          "it with parallel.strategy=ddp");
  require(device != DeviceChoice::kCpu || parallel.backend != BackendChoice::kNccl,
          "[config] expected parallel.backend=nccl with GPUs only, got it with device=cpu");
  require(!parallel.canonical ||
              (device != DeviceChoice::kCpu && parallel.backend != BackendChoice::kThreads),
          "[config] expected parallel.canonical=true with nccl only, got it with {}, which always "
          "sums in the order of ranks",
          device == DeviceChoice::kCpu ? "device=cpu" : "parallel.backend=threads");
  // Samples are numbered in 64 bits. How many ranks 0 stands for depends on the machine.
  const std::int64_t ranks = parallel.ranks > 0 ? parallel.ranks : kMaxRanks;
  std::int64_t num_samples = train.steps;
  bool fits = true;
  for (const std::int64_t factor : {train.accum, train.batch, ranks}) {
    fits = !__builtin_mul_overflow(num_samples, factor, &num_samples) && fits;
  }
  require(fits,
          "[config] expected at most {} samples, got train.steps={} x train.accum={} x "
          "train.batch={} x {} ranks (parallel.ranks={})",
          std::numeric_limits<std::int64_t>::max(), train.steps, train.accum, train.batch, ranks,
          parallel.ranks);
  require(!out.empty(), "[config] expected a folder, got an empty value (out)");
}

shard::FsdpOptions TrainConfig::fsdp_options() const {
  shard::Placement placement = shard::Placement::preset(parallel.strategy);
  if (parallel.reshard_after_forward != "auto") {
    placement.reshard_after_forward = parallel.reshard_after_forward == "true";
  }
  return {.placement = placement,
          .prefetch = static_cast<int>(parallel.prefetch),
          .unit_min_numel = parallel.unit_min_numel,
          .precision = precision,
          .communicate = train.accum_comm,
          .seed = static_cast<std::uint64_t>(train.seed),
          .listener = listener};
}

std::chrono::milliseconds TrainConfig::deadline() const {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(parallel.deadline_s * 1e3)));
}

}  // namespace tessera::tools

#include "tools/config/train_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numbers>
#include <system_error>

#include "engine/error.h"
#include "tools/io/nbytes.h"
#include "tools/machine/limits.h"
#include "tools/probe/probe_record.h"

namespace tessera::tools {

using engine::DType;
using engine::IoError;
using engine::require;

namespace {

constexpr std::int64_t kMaxBlocks = 1'000'000;
// What parallel.reshard_after_forward can say beside a number of ranks.
constexpr int kReshardAsStrategy = -2, kKeep = -1;

// FIRST:LAST, of `steps` steps; those after `start`.
StepRange parse_steps(const std::string& text, std::int64_t steps, std::int64_t start,
                      const char* option) {
  StepRange range;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, range.first);
  const bool has_colon = first.ec == std::errc() && first.ptr != end && *first.ptr == ':';
  const auto last = std::from_chars(has_colon ? first.ptr + 1 : end, end, range.last);
  require(has_colon && last.ec == std::errc() && last.ptr == end && range.first >= 1 &&
              range.first <= range.last && range.last <= steps,
          "[config] expected auto or FIRST:LAST from 1:1 to {0}:{0} (train.steps={0}), got '{1}' "
          "({2})",
          steps, text, option);
  range.first = std::max(range.first, start + 1);
  return range;
}

}  // namespace

std::string why_none_of(const StepRange& steps, std::int64_t start) {
  if (steps.first <= steps.last) {
    return fmt::format("the run ended before the end of step {}", steps.first);
  }
  if (start == 0) return "the run has no step";
  return fmt::format("the run went on after step {} and the steps to record end with {}", start,
                     steps.last);
}

std::int64_t TrainConfig::memory_limit_nbytes() const {
  return memory_budget.empty() ? 0 : parse_nbytes(memory_budget, "memory_budget");
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
  flags.add("cpu.isa", &cpu.isa,
            {.help = "the CPU's instruction set, v2 to v4 as x86-64 counts them; auto: the best it "
                     "has, or TESSERA_CPU_ISA in the environment",
             .choices = {"auto", "v2", "v3", "v4", "v4+bf16", "v4+amx"}});
  flags.add("cpu.gemm", &cpu.gemm,
            {.help = "who multiplies matrices on the CPU; auto: oneDNN where it is installed, or "
                     "TESSERA_CPU_GEMM in the environment; split: f32 as six products of bf16, on "
                     "a CPU with AMX",
             .choices = {"auto", "onednn", "eigen", "split"}});
  flags.add("cpu.threads_per_rank", &cpu.threads_per_rank,
            {.help = "threads that each rank multiplies matrices with, on the CPU, by oneDNN; bits "
                     "may depend on their number",
             .min = 1,
             .max = 1024});
  flags.add(
      "cpu.pin", &cpu.pin,
      {.help = "each rank keeps to cores of its own, cpu.threads_per_rank of them; there must "
               "be enough"});
  flags.add(
      "cuda.graph", &cuda.graph,
      EnumOption<GraphChoice>{
          "on a GPU, with one rank: after the first two steps each step is one launch of a "
          "CUDA graph, with the same bits; auto: on where it can be, off where something "
          "that was asked for needs the host, which the run says",
          {{"auto", GraphChoice::kAuto}, {"on", GraphChoice::kOn}, {"off", GraphChoice::kOff}}});
  flags.add("cuda.tune_gemm", &cuda.tune_gemm,
            {.help = "on GPUs: before training, time the algorithms that cublasLt proposes for "
                     "each matrix product of a step, those that do GELU or its slope as well among "
                     "them, and keep the fastest; false: take the first, and both apart"});
  flags.add("cuda.gemm_algorithms", &cuda.gemm_algorithms,
            {.help = "file where those that were chosen are kept, and found by later runs, which "
                     "then have the same bits; default: gemm_algorithms.txt in the output folder"});
  flags.add("parallel.ranks", &parallel.ranks,
            {.help = fmt::format("ranks, one thread each, which take the GPUs in turn; 0: one a "
                                 "GPU, or {} on the CPU",
                                 parallel.cpu_ranks),
             .min = 0,
             .max = parallel.max_ranks});
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
  flags.add("parallel.shard_ranks", &parallel.shard_ranks,
            {.help = "of hsdp, hybrid_zero2 and hfsdp: ranks that share one copy; divides the "
                     "ranks; 0: the largest divisor that is at most half of them",
             .min = 0,
             .max = parallel.max_ranks});
  flags.add("parallel.prefetch", &parallel.prefetch,
            {.help = "units gathered ahead of use", .min = 0, .max = 1024});
  flags.add(
      "parallel.backward_prefetch", &parallel.backward_prefetch,
      EnumOption<shard::BackwardPrefetch>{
          "when backward starts the gathers ahead: before a unit's backward, or after it",
          {{"pre", shard::BackwardPrefetch::kPre}, {"post", shard::BackwardPrefetch::kPost}}});
  flags.add("parallel.reductions_in_flight", &parallel.reductions_in_flight,
            {.help = "gradients on their way while backward goes on", .min = 0, .max = 1024});
  flags.add("parallel.reshard_after_forward", &parallel.reshard_after_forward,
            {.help = "give gathered parameters back between forward and backward: true, false, or "
                     "a number of neighbouring ranks that keep one copy together; auto: as the "
                     "strategy says",
             .choices = {"auto", "true", "false"},
             .max_number = parallel.max_ranks});
  flags.add("parallel.unit_min_numel", &parallel.unit_min_numel,
            {.help = "pack neighbouring blocks until a unit has this many parameters", .min = 0});
  flags.add("parallel.bucket_mb", &parallel.bucket_mb,
            {.help = "of strategies whose parameters stay whole: pack blocks, the last ones first, "
                     "until a gradient that is reduced has this many MiB (the first one 1); 0: off",
             .min = 0,
             .max = 1 << 20});
  flags.add("parallel.deadline_s", &parallel.deadline_s,
            {.help = "how long a rank waits for the others, in seconds",
             .min = 0,
             .max = 86400,
             .above_min = true});
  comm.add_to(flags);
  const auto precision_flag = [&](const char* name, DType* field, const char* help) {
    flags.add(name, field, EnumOption<DType>{help, {{"f32", DType::kF32}, {"bf16", DType::kBF16}}});
  };
  precision_flag("precision.param", &precision.param,
                 "parameters on the wire and in compute; masters are f32");
  precision_flag(
      "precision.reduce", &precision.reduce,
      "each micro-step's gradient on the wire; sums are f32, those of nccl's own order in the "
      "wire's dtype");
  precision_flag("precision.accumulate", &precision.accumulate,
                 "what backward accumulates gradients into");
  const auto fraction_flag = [&](const char* name, double* field, const char* help) {
    flags.add(name, field, NumberOption{.help = help, .min = 0, .max = 1});
  };
  fraction_flag(
      "offload.parameters", &offload.parameters,
      "fraction of each rank's shard of the parameters that lies in page-locked memory of "
      "the host and is fetched ahead of its gather; of parameters that are whole on every "
      "rank the masters, which only bf16 has apart");
  fraction_flag("offload.gradients", &offload.gradients,
                "the same of the sums of gradients, which are sent as units finish");
  fraction_flag("offload.optimizer", &offload.optimizer,
                "the same of the optimizer's states, which threads of the host update");
  flags.add("offload.threads", &offload.threads,
            {.help = "threads of the host that update and cast, for each rank; 0: the cores that "
                     "affinity and cgroups leave to this process, shared by the ranks; with "
                     "cpu.pin those of the rank",
             .min = 0,
             .max = 1024});
  flags.add("train.steps", &train.steps, {.help = "optimizer steps", .min = 0});
  flags.add("train.batch", &train.batch,
            {.help = "samples per rank and micro-step", .min = 1, .max = 1 << 24});
  flags.add("train.accum", &train.accum,
            {.help = "micro-steps per step", .min = 1, .max = 1 << 20});
  flags.add("train.accum_comm", &train.accum_comm,
            EnumOption<AccumComm>{"reduce gradients every micro-step, or at the last",
                                  {{"every", AccumComm::kEvery}, {"last", AccumComm::kLast}}});
  flags.add("train.seed", &train.seed,
            {.help = "of initial parameters, data order and dropout", .min = 0});
  flags.add(
      "train.optimizer", &train.optimizer,
      EnumOption<OptimizerKind>{"AdamW, or SGD: v = momentum v + g; p -= lr v",
                                {{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}});
  flags.add("train.lr", &train.lr, {.help = "peak learning rate", .min = 0, .max = kHuge});
  flags.add("train.momentum", &train.momentum,
            {.help = "of sgd", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("train.weight_decay", &train.weight_decay,
            {.help = "of adamw, on tensors of two or more dimensions", .min = 0, .max = kHuge});
  flags.add("train.beta1", &train.beta1,
            {.help = "of adamw", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("train.beta2", &train.beta2,
            {.help = "of adamw", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("train.eps", &train.eps,
            {.help = "of adamw", .min = 0, .max = kHuge, .above_min = true, .is_f32 = true});
  flags.add(
      "train.overlap_optimizer", &train.overlap_optimizer,
      EnumOption<OverlapOptimizer>{
          "update parameters as soon as their gradient is final, beside the rest of backward; "
          "where each rank updates a part of whole parameters (zero1, zero2, hybrids) the "
          "parts are gathered after the last reduction (backward) or at once (interleaved); "
          "not with train.grad_clip",
          {{"none", OverlapOptimizer::kNone},
           {"backward", OverlapOptimizer::kBackward},
           {"interleaved", OverlapOptimizer::kInterleaved}}});
  flags.add("train.grad_clip", &train.grad_clip,
            {.help = "largest norm of the gradient; 0: off", .min = 0, .max = kHuge});
  flags.add("train.max_skips", &train.max_skips,
            {.help = "updates in a row that are skipped because a gradient is not finite; one more "
                     "ends the run",
             .min = 0});
  flags.add("train.check_gradients", &train.check_gradients,
            {.help = "look for what is not finite on each rank before gradients are reduced, so "
                     "that messages name the rank and the micro-step that was reduced too"});
  flags.add("train.warmup", &train.warmup,
            {.help = "steps of linear warmup of the learning rate", .min = 0});
  flags.add("train.schedule", &train.schedule,
            EnumOption<ScheduleKind>{"of the learning rate after warmup; to 0 at train.steps",
                                     {{"constant", ScheduleKind::kConstant},
                                      {"cosine", ScheduleKind::kCosine},
                                      {"linear", ScheduleKind::kLinear}}});
  flags.add(
      "train.spike_factor", &train.spike_factor,
      {.help = "a step whose loss is over that many times the median of the last 32, or not "
               "finite, is made again from the same state before it is believed: with another "
               "result the machine has failed and training goes on, with the same it ends, "
               "before the update, with a checkpoint if any are saved; 0: off",
       .min = 0,
       .max = kHuge});
  flags.add("train.verify_every", &train.verify_every,
            {.help = "steps between those that are made again from the same state and compared bit "
                     "by bit, as a check of the machine; 0: off",
             .min = 0});
  flags.add("train.max_minutes", &train.max_minutes,
            {.help = "end after the step at which training has taken that long, as a signal would "
                     "end it, with a checkpoint if any are saved; 0: no limit",
             .min = 0,
             .max = 1e6});
  checkpoint.add_to(flags);
  flags.add_switch("train.recompute", &train.recompute.blocks,
                   "keep no activations of a block, and run its forward again in backward: every "
                   "block, none, or the first so many",
                   kMaxBlocks);
  flags.add("log.every", &log.every,
            {.help = "steps between lines on the terminal; 0: none", .min = 0});
  flags.add("log.val_every", &log.val_every,
            {.help = "steps between validations; 0: at the end only", .min = 0});
  flags.add(
      "log.jsonl", &log.jsonl,
      {.help =
           "file of one JSON line a step, numbered from 1; empty: log.jsonl in the output folder"});
  flags.add("log.trace", &log.trace,
            {.help = "file for a trace of what ran when on all ranks, which ui.perfetto.dev opens; "
                     "with plan of the planned steps, in simulated time; empty: none"});
  flags.add("log.trace_steps", &log.trace_steps,
            {.help = "steps that the trace shows, as FIRST:LAST, numbered from 1; auto: the third "
                     "to the fifth that this process makes, or the last ones of a shorter run; "
                     "not with plan, whose steps are all shown"});
  flags.add("log.probe", &log.probe,
            {.help = "file for checksums of parameters, activations and gradients of all ranks, "
                     "which compare --find-divergence reads; empty: none"});
  flags.add("log.probe_steps", &log.probe_steps,
            {.help = "steps that have checksums, as FIRST:LAST, numbered from 1; auto: all"});
  flags.add("log.probe_values", &log.probe_values,
            {.help = "instead of all checksums the values of one tensor, as "
                     "PHASE:MICRO_BATCH:VISIT:TENSOR; the run ends with the last of "
                     "log.probe_steps; empty: none"});
  flags.add("log.tensorboard", &log.tensorboard,
            {.help = "folder for a file of scalars that TensorBoard shows, made if need be; empty: "
                     "none"});
  flags.add(
      "log.peak_ms", &log.peak_ms,
      {.help = "how long the ranks multiply matrices before the first step, on the CPU, to know "
               "the peak that a step's rate is part of: three times, of which the best counts; 0: "
               "not at all",
       .min = 0,
       .max = 10'000});
  flags.add("out", &out, {.help = "folder for everything written, made if need be"});
  flags.add("plan", &plan,
            {.help = "say what a step would do, its memory, messages and simulated time, and end"});
  flags.add("audit", &audit,
            {.help = "compare each step with the plan: bytes sent, collectives, peaks of memory; a "
                     "difference is an error at the end of the run; and say which gathers "
                     "computation would wait for at --rates.*"});
  rates.add_to(flags);
  flags.add(
      "memory_budget", &memory_budget,
      {.help =
           "most memory that a rank's device may hold, such as 40GiB: trains in the fastest way "
           "that fits, by planned time at --rates.*: with less prefetch, recomputing, offload "
           "and, if nothing else does, smaller micro-batches; if nothing fits, the error says "
           "which budget would; empty: no limit"});
  flags.add("memory_check", &memory_check,
            {.help = "refuse a training whose plan takes more of the host's memory, all ranks "
                     "together, than the machine, its cgroup or ulimit -v has left; false: warn "
                     "and go on, though the kernel may end the process without a word"});
}

void TrainConfig::validate(const FlagSet& flags) const {
  static_cast<void>(memory_limit_nbytes());  // or throws
  for (const char* name : {"audit", "log.jsonl", "log.trace_steps", "log.probe", "log.probe_steps",
                           "log.probe_values", "log.tensorboard"}) {
    require(!plan || !flags.is_given(name),
            "[config] expected {} without plan only, got it with: no step is made, and log.trace "
            "draws all that are planned",
            name);
  }
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
  require(
      train.overlap_optimizer == OverlapOptimizer::kNone || train.grad_clip == 0,
      "[config] expected train.grad_clip=0 with train.overlap_optimizer, got {}: the norm of the "
      "gradient is known when backward has ended, and most is updated by then",
      train.grad_clip);
  require(train.overlap_optimizer == OverlapOptimizer::kNone || train.max_skips == 0,
          "[config] expected train.max_skips=0 with train.overlap_optimizer, got {}: what is not "
          "finite is known when backward has ended, and most is updated by then",
          train.max_skips);
  if (train.guards()) {
    const char* const option = train.spike_factor > 0 ? "train.spike_factor" : "train.verify_every";
    require(train.spike_factor == 0 || train.spike_factor > 1,
            "[config] expected train.spike_factor above 1, got {}", train.spike_factor);
    require(train.overlap_optimizer == OverlapOptimizer::kNone,
            "[config] expected train.overlap_optimizer=none with {}, got another: what is updated "
            "beside backward cannot be made again",
            option);
    require(!comm.options().compresses(),
            "[config] expected no comm.hook that remembers earlier steps with {}, got {}", option,
            comm.hook);
    require(log.probe.empty(),
            "[config] expected no log.probe with {}, got '{}': a record has each step once", option,
            log.probe);
  }
  const shard::Placement placement = parallel.preset();
  require(offload.parameters == 0 || shard::can_offload_parameters(placement, precision),
          "[config] expected offload.parameters=0 with parallel.strategy={} and "
          "precision.param=f32, got {}: the masters are what is computed with",
          parallel.strategy, offload.parameters);
  require(offload.threads == 0 || offload.any(),
          "[config] expected offload.threads with something to offload, got {} without",
          offload.threads);
  const int reshard = reshard_ranks();
  require(placement.parameters != shard::Place::kWhole || reshard == kReshardAsStrategy ||
              reshard == kKeep,
          "[config] expected parallel.reshard_after_forward={} with sharded parameters only, got "
          "it with parallel.strategy={}",
          parallel.reshard_after_forward, parallel.strategy);
  require(
      parallel.backward_prefetch == shard::BackwardPrefetch::kPre ||
          (parallel.prefetch > 0 && placement.parameters != shard::Place::kWhole),
      "[config] expected parallel.backward_prefetch=post where units are gathered ahead, got it "
      "with parallel.prefetch={} and parallel.strategy={}",
      parallel.prefetch, parallel.strategy);
  require(parallel.shard_ranks == 0 || placement.is_hybrid(),
          "[config] expected parallel.shard_ranks with hsdp, hybrid_zero2 or hfsdp only, got {} "
          "with parallel.strategy={}",
          parallel.shard_ranks, parallel.strategy);
  require(
      parallel.bucket_mb == 0 || placement.parameters == shard::Place::kWhole,
      "[config] expected parallel.bucket_mb with ddp, zero1, zero2 or hybrid_zero2 only, got {} "
      "with parallel.strategy={}: there parallel.unit_min_numel packs",
      parallel.bucket_mb, parallel.strategy);
  require(parallel.bucket_mb == 0 || parallel.unit_min_numel == 0,
          "[config] expected parallel.bucket_mb or parallel.unit_min_numel, got {} and {}",
          parallel.bucket_mb, parallel.unit_min_numel);
  require(device != DeviceChoice::kCpu || parallel.backend != BackendChoice::kNccl,
          "[config] expected parallel.backend=nccl with GPUs only, got it with device=cpu");
  require(!parallel.canonical ||
              (device != DeviceChoice::kCpu && parallel.backend != BackendChoice::kThreads),
          "[config] expected parallel.canonical=true with nccl only, got it with {}, which always "
          "sums in the order of ranks",
          device == DeviceChoice::kCpu ? "device=cpu" : "parallel.backend=threads");
  checkpoint.validate(flags);
  comm.validate(flags, parallel.strategy, precision, train.grad_clip, train.max_skips);
  // Samples are numbered in 64 bits. How many ranks 0 stands for depends on the machine.
  const std::int64_t ranks = parallel.ranks > 0 ? parallel.ranks : parallel.max_ranks;
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
  require(!log.trace.empty() || log.trace_steps == "auto",
          "[config] expected log.trace_steps with log.trace only, got {} without", log.trace_steps);
  static_cast<void>(trace_steps());  // throws
  require(!log.probe.empty() || (log.probe_steps == "auto" && log.probe_values.empty()),
          "[config] expected {0} with log.probe only, got {1} without",
          log.probe_values.empty() ? "log.probe_steps" : "log.probe_values",
          log.probe_values.empty() ? log.probe_steps : log.probe_values);
  static_cast<void>(probe_steps());
  if (!log.probe_values.empty()) static_cast<void>(parse_target(log.probe_values));
}

void TrainConfig::check_blocks(std::int64_t num_blocks) const {
  require(train.recompute.blocks == Recompute::kAll || train.recompute.blocks <= num_blocks,
          "[config] expected train.recompute of at most the {} blocks of the model, got {}",
          num_blocks, train.recompute.blocks);
}

StepRange TrainConfig::trace_steps(std::int64_t start) const {
  if (log.trace_steps != "auto") {
    return parse_steps(log.trace_steps, train.steps, start, "log.trace_steps");
  }
  // With the last of probe_steps a run ends that is after values.
  const std::int64_t steps = log.probe_values.empty() ? train.steps : probe_steps().last;
  return {std::max(start + 1, std::min(start + 3, steps)), std::min(start + 5, steps)};
}

StepRange TrainConfig::probe_steps(std::int64_t start) const {
  if (log.probe_steps != "auto") {
    return parse_steps(log.probe_steps, train.steps, start, "log.probe_steps");
  }
  return {start + 1, train.steps};
}

int TrainConfig::reshard_ranks() const {
  const std::string& text = parallel.reshard_after_forward;
  if (text == "auto") return kReshardAsStrategy;
  if (text == "false") return kKeep;
  if (text == "true") return 0;
  int ranks = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ranks);
  require(error == std::errc() && end == text.data() + text.size() && ranks >= 1,
          "[config] expected auto, true, false or a number of ranks from 1 on, got '{}' "
          "(parallel.reshard_after_forward)",
          text);
  return ranks;
}

int TrainConfig::offload_threads(int num_ranks) const {
  if (offload.threads > 0) return static_cast<int>(offload.threads);
  if (!offload.any()) return 1;
  if (cpu.pin) return static_cast<int>(cpu.threads_per_rank);
  const int num_local =
      parallel.local_ranks > 0 ? static_cast<int>(parallel.local_ranks) : num_ranks;
  return std::max(1, read_limits().usable_cores() / num_local);
}

shard::FsdpOptions TrainConfig::fsdp_options(int num_ranks) const {
  shard::Placement placement = parallel.preset();
  const int reshard = reshard_ranks();
  if (reshard != kReshardAsStrategy) {
    placement.reshard_after_forward = reshard != kKeep;
    placement.reshard_ranks = std::max(reshard, 0);
  }
  if (parallel.shard_ranks > 0) placement.shard_ranks = static_cast<int>(parallel.shard_ranks);
  const int shard_ranks = placement.shard_ranks = placement.shard_ranks_of(num_ranks);
  require(num_ranks % shard_ranks == 0,
          "[config] expected parallel.shard_ranks that divides {} rank{}, got {}", num_ranks,
          num_ranks == 1 ? "" : "s", shard_ranks);
  require(placement.reshard_ranks == 0 || shard_ranks % placement.reshard_ranks == 0,
          "[config] expected parallel.reshard_after_forward that divides the ranks that shard, {}, "
          "got {}",
          shard_ranks, placement.reshard_ranks);
  require(!comm.powersgd.across_replicas || shard_ranks < num_ranks,
          "[config] expected powersgd.across_replicas with more than one replica, got one, as {} "
          "a copy (parallel.strategy={}, parallel.shard_ranks={})",
          num_ranks == 1 ? "the only rank has" : fmt::format("all {} ranks share", num_ranks),
          parallel.strategy, parallel.shard_ranks);
  return {.placement = placement,
          .prefetch = static_cast<int>(parallel.prefetch),
          .backward_prefetch = parallel.backward_prefetch,
          .reductions_in_flight = static_cast<int>(parallel.reductions_in_flight),
          .unit_min_numel = parallel.unit_min_numel,
          .bucket_nbytes = static_cast<std::int64_t>(std::ceil(parallel.bucket_mb * (1 << 20))),
          .precision = precision,
          .non_finite = train.max_skips > 0 || train.guards() ? shard::NonFinite::kSkip
                                                              : shard::NonFinite::kThrow,
          .check_gradients = train.check_gradients,
          .offload = {.parameters = offload.parameters,
                      .gradients = offload.gradients,
                      .optimizer = offload.optimizer,
                      .threads = offload_threads(num_ranks)},
          .seed = static_cast<std::uint64_t>(train.seed),
          .reducer = make_hook(comm.options()),
          .reducer_text = comm.text()};
}

std::chrono::milliseconds TrainConfig::deadline() const {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(parallel.deadline_s * 1e3)));
}

}  // namespace tessera::tools

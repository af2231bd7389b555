#include "tools/config/train_config.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "engine/error.h"
#include "tools/io/nbytes.h"
#include "tools/probe/probe_record.h"

namespace tessera::tools {

using engine::DType;
using engine::require;

std::int64_t TrainConfig::memory_limit_nbytes() const {
  return memory_budget.empty() ? 0 : parse_nbytes(memory_budget, "memory_budget");
}

void TrainConfig::add_to(FlagSet& flags) {
  flags.add("device", &device,
            EnumOption<DeviceChoice>{"what computes; auto: cuda where there is a GPU, else cpu",
                                     {{"auto", DeviceChoice::kAuto},
                                      {"cpu", DeviceChoice::kCpu},
                                      {"cuda", DeviceChoice::kCuda}}});
  cpu.add_to(flags);
  cuda.add_to(flags);
  parallel.add_to(flags);
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
  offload.add_to(flags);
  train.add_to(flags);
  checkpoint.add_to(flags);
  log.add_to(flags);
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
  train.validate(flags);
  if (train.guards()) {
    const char* const option = train.guarding_option();
    require(!comm.options().compresses(),
            "[config] expected no comm.hook that remembers earlier steps with {}, got {}", option,
            comm.hook);
    require(log.probe.empty(),
            "[config] expected no log.probe with {}, got '{}': a record has each step once", option,
            log.probe);
  }
  offload.validate(parallel.preset(), parallel.strategy, precision);
  parallel.validate(device);
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
  log.validate(train.steps);
}

void TrainConfig::check_blocks(std::int64_t num_blocks) const {
  require(train.recompute.blocks == Recompute::kAll || train.recompute.blocks <= num_blocks,
          "[config] expected train.recompute of at most the {} blocks of the model, got {}",
          num_blocks, train.recompute.blocks);
}

shard::FsdpOptions TrainConfig::fsdp_options(int num_ranks) const {
  const shard::Placement placement = parallel.placement(num_ranks);
  const int shard_ranks = placement.shard_ranks;
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
                      .threads = offload.threads_of_rank(
                          cpu, parallel.local_ranks > 0 ? static_cast<int>(parallel.local_ranks)
                                                        : num_ranks)},
          .seed = static_cast<std::uint64_t>(train.seed),
          .reducer = make_hook(comm.options()),
          .reducer_text = comm.text()};
}

}  // namespace tessera::tools

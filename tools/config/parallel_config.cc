#include "tools/config/parallel_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>

#include "engine/error.h"

namespace tessera::tools {

using engine::require;

namespace {

// What parallel.reshard_after_forward can say besides a number of ranks.
constexpr int kReshardAsStrategy = -2, kKeep = -1;

}  // namespace

void ParallelConfig::add_to(FlagSet& flags) {
  flags.add("parallel.ranks", &ranks,
            {.help = fmt::format("ranks, one thread each, which take the GPUs in turn; 0: one a "
                                 "GPU, or {} on the CPU; under a launcher there are as many as "
                                 "processes x parallel.threads",
                                 cpu_ranks),
             .min = 0,
             .max = max_ranks});
  flags.add("parallel.threads", &threads,
            {.help = "ranks of each process that a launcher starts, one thread each, which share "
                     "memory, or have a GPU each; 0: one; without a launcher this says what "
                     "parallel.ranks says",
             .min = 0,
             .max = max_ranks});
  flags.add("parallel.backend", &backend,
            EnumOption<BackendChoice>{
                "what moves tensors between ranks: threads alone, on the CPU and on GPUs, or nccl, "
                "which needs a GPU for each; auto: nccl where every rank of several has its own",
                {{"auto", BackendChoice::kAuto},
                 {"threads", BackendChoice::kThreads},
                 {"nccl", BackendChoice::kNccl}}});
  add_launch_to(flags);
  flags.add("parallel.canonical", &canonical,
            {.help = "nccl sums in the order of ranks, as threads always do: the same bits however "
                     "many GPUs, for more traffic"});
  flags.add("parallel.strategy", &strategy,
            {.help = "what is sharded between uses; zero3 = full_shard = fsdp",
             .choices = shard::Placement::preset_names()});
  flags.add("parallel.shard_ranks", &shard_ranks,
            {.help = "of hsdp, hybrid_zero2 and hfsdp: ranks that share one copy; divides the "
                     "ranks; 0: those of a process with parallel.threads, or of one of several "
                     "hosts, else the largest divisor that is at most half of them",
             .min = 0,
             .max = max_ranks});
  flags.add("parallel.prefetch", &prefetch,
            {.help = "units gathered ahead of use", .min = 0, .max = 1024});
  flags.add(
      "parallel.backward_prefetch", &backward_prefetch,
      EnumOption<shard::BackwardPrefetch>{
          "when backward starts the gathers ahead: before a unit's backward, or after it",
          {{"pre", shard::BackwardPrefetch::kPre}, {"post", shard::BackwardPrefetch::kPost}}});
  flags.add("parallel.reductions_in_flight", &reductions_in_flight,
            {.help = "gradients on their way while backward goes on", .min = 0, .max = 1024});
  flags.add("parallel.reshard_after_forward", &reshard_after_forward,
            {.help = "give gathered parameters back between forward and backward: true, false, or "
                     "a number of neighbouring ranks that keep one copy together; auto: as the "
                     "strategy says",
             .choices = {"auto", "true", "false"},
             .max_number = max_ranks});
  flags.add("parallel.unit_min_numel", &unit_min_numel,
            {.help = "pack neighbouring blocks until a unit has this many parameters", .min = 0});
  flags.add("parallel.bucket_mb", &bucket_mb,
            {.help = "of strategies whose parameters stay whole: pack blocks, the last ones first, "
                     "until a gradient that is reduced has this many MiB (the first one 1); 0: off",
             .min = 0,
             .max = 1 << 20});
}

void ParallelConfig::add_launch_to(FlagSet& flags) {
  flags.add(
      "parallel.launcher", &launcher,
      EnumOption<LauncherChoice>{
          "who starts the processes of one training: torchrun, slurm (srun), openmpi or hydra "
          "(mpirun), env (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand), or threads, "
          "nobody; auto: as their variables in the environment say",
          {kLauncherChoices.begin(), kLauncherChoices.end()}});
  flags.add("parallel.transport", &transport,
            EnumOption<TransportChoice>{
                "what moves tensors between processes: nccl between GPUs; on CPUs mpi, where "
                "the launcher is one of MPI, or gloo; auto: nccl on GPUs, else mpi where it can be",
                {{"auto", TransportChoice::kAuto},
                 {"mpi", TransportChoice::kMpi},
                 {"gloo", TransportChoice::kGloo},
                 {"nccl", TransportChoice::kNccl}}});
  flags.add(
      "parallel.address", &address,
      {.help = "where processes meet, tcp:HOST:PORT of the first one's host or file:PATH in a "
               "folder that all see, as in file:~/meet; empty: as the launcher or its MPI says"});
  flags.add("parallel.interface", &interface,
            {.help = "network interface of each host, or an address of it, at which gloo's other "
                     "processes reach it; empty: that of GLOO_SOCKET_IFNAME, else the one of the "
                     "default route"});
  flags.add("parallel.insecure", &insecure,
            {.help = "let processes of other hosts join without TESSERA_SECRET, which is a text "
                     "that all must have in their environment"});
  flags.add("parallel.deadline_s", &deadline_s,
            {.help = "how long a rank waits for the others, in seconds",
             .min = 0,
             .max = 86400,
             .above_min = true});
}

void ParallelConfig::validate(DeviceChoice device) const {
  const shard::Placement placement = preset();
  const int reshard = this->reshard();
  require(placement.parameters != shard::Place::kWhole || reshard == kReshardAsStrategy ||
              reshard == kKeep,
          "[config] expected parallel.reshard_after_forward={} with sharded parameters only, got "
          "it with parallel.strategy={}",
          reshard_after_forward, strategy);
  require(
      backward_prefetch == shard::BackwardPrefetch::kPre ||
          (prefetch > 0 && placement.parameters != shard::Place::kWhole),
      "[config] expected parallel.backward_prefetch=post where units are gathered ahead, got it "
      "with parallel.prefetch={} and parallel.strategy={}",
      prefetch, strategy);
  require(shard_ranks == 0 || placement.is_hybrid(),
          "[config] expected parallel.shard_ranks with hsdp, hybrid_zero2 or hfsdp only, got {} "
          "with parallel.strategy={}",
          shard_ranks, strategy);
  require(
      bucket_mb == 0 || placement.parameters == shard::Place::kWhole,
      "[config] expected parallel.bucket_mb with ddp, zero1, zero2 or hybrid_zero2 only, got {} "
      "with parallel.strategy={}: there parallel.unit_min_numel packs",
      bucket_mb, strategy);
  require(bucket_mb == 0 || unit_min_numel == 0,
          "[config] expected parallel.bucket_mb or parallel.unit_min_numel, got {} and {}",
          bucket_mb, unit_min_numel);
  require(device != DeviceChoice::kCpu || backend != BackendChoice::kNccl,
          "[config] expected parallel.backend=nccl with GPUs only, got it with device=cpu");
  require(!canonical || (device != DeviceChoice::kCpu && backend != BackendChoice::kThreads),
          "[config] expected parallel.canonical=true with nccl only, got it with {}, which always "
          "sums in the order of ranks",
          device == DeviceChoice::kCpu ? "device=cpu" : "parallel.backend=threads");
}

int ParallelConfig::reshard() const {
  const std::string& text = reshard_after_forward;
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

shard::Placement ParallelConfig::placement(int num_ranks) const {
  shard::Placement placement = preset();
  const int reshard = this->reshard();
  if (reshard != kReshardAsStrategy) {
    placement.reshard_after_forward = reshard != kKeep;
    placement.reshard_ranks = std::max(reshard, 0);
  }
  if (shard_ranks > 0) {
    placement.shard_ranks = static_cast<int>(shard_ranks);
  } else if (replica_ranks > 0 && placement.is_hybrid()) {
    placement.shard_ranks = static_cast<int>(replica_ranks);
  }
  placement.shard_ranks = placement.shard_ranks_of(num_ranks);
  require(num_ranks % placement.shard_ranks == 0,
          "[config] expected parallel.shard_ranks that divides {} rank{}, got {}", num_ranks,
          num_ranks == 1 ? "" : "s", placement.shard_ranks);
  require(placement.reshard_ranks == 0 || placement.shard_ranks % placement.reshard_ranks == 0,
          "[config] expected parallel.reshard_after_forward that divides the ranks that shard, {}, "
          "got {}",
          placement.shard_ranks, placement.reshard_ranks);
  return placement;
}

std::chrono::milliseconds ParallelConfig::deadline() const {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(deadline_s * 1e3)));
}

}  // namespace tessera::tools

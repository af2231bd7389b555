// The options of what is sharded, over which ranks: --parallel.*.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "shard/options.h"
#include "shard/placement.h"
#include "tools/cli/flags.h"
#include "tools/config/device_config.h"
#include "tools/config/launcher_choice.h"

namespace tessera::tools {

enum class BackendChoice { kAuto, kThreads, kNccl };
enum class TransportChoice { kAuto, kMpi, kGloo, kNccl };

/// What is left open here, Ranks decides for a machine: see ranks.h.
struct ParallelConfig {
  std::int64_t ranks = 0;          ///< 0: one a GPU, or `cpu_ranks`; of a launcher, all of them
  std::int64_t threads = 0;        ///< ranks of each process; 0: of a launcher one, else as `ranks`
  std::int64_t cpu_ranks = 4;      ///< the program's own, no flag
  std::int64_t max_ranks = 1024;   ///< the program's own, no flag: of threads
  std::int64_t local_ranks = 0;    ///< what Ranks says, no flag: on this host; 0: all
  std::int64_t replica_ranks = 0;  ///< what Ranks says, no flag: of a replica, unless shard_ranks
                                   ///< does; 0: the strategy's
  std::string replica_place = {};  ///< what Ranks says, no flag: where all of these are, "process"
  LauncherChoice launcher = LauncherChoice::kAuto;
  TransportChoice transport = TransportChoice::kAuto;  ///< of several processes
  std::string address;                                 ///< empty: the launcher's
  std::string interface;  ///< of gloo; empty: the launcher's, or the default route's
  bool insecure = false;
  BackendChoice backend = BackendChoice::kAuto;
  bool canonical = false;  ///< nccl: reductions in rank order
  std::string strategy = "zero3";
  std::int64_t shard_ranks = 0;  ///< 0: the strategy's
  std::int64_t prefetch = 1;
  shard::BackwardPrefetch backward_prefetch = shard::BackwardPrefetch::kPre;
  std::int64_t reductions_in_flight = 1;
  std::string reshard_after_forward = "auto";  ///< auto: the strategy's; true, false or a number
  std::int64_t unit_min_numel = 0;
  double bucket_mb = 0;  ///< 0: off
  double deadline_s = 300;

  /// What `strategy` stands for; other options may change it, see placement().
  shard::Placement preset() const { return shard::Placement::preset(strategy); }
  /// Of `num_ranks` ranks, with their number in a replica. Throws InvalidArgument for what does not
  /// fit them.
  shard::Placement placement(int num_ranks) const;
  std::chrono::milliseconds deadline() const;

  void add_to(FlagSet& flags);
  /// Adds only the options that say how processes find and reach each other.
  void add_launch_to(FlagSet& flags);
  /// Throws InvalidArgument for values that contradict each other or would have no effect.
  void validate(DeviceChoice device) const;

 private:
  // What reshard_after_forward says; see parallel_config.cc.
  int reshard() const;
};

}  // namespace tessera::tools

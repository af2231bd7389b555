// What the trainers share of their configuration: flags and TOML keys of the same names.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "shard/options.h"
#include "tools/cli/flags.h"
#include "tools/config/checkpoint_config.h"
#include "tools/config/comm_config.h"
#include "tools/config/device_config.h"
#include "tools/config/log_config.h"
#include "tools/config/offload_config.h"
#include "tools/config/parallel_config.h"
#include "tools/config/rates_config.h"
#include "tools/config/step_config.h"

namespace tessera::tools {

struct TrainConfig {
  DeviceChoice device = DeviceChoice::kAuto;
  CpuConfig cpu;
  CudaConfig cuda;
  ParallelConfig parallel;
  CommConfig comm;
  shard::Precision precision;
  OffloadConfig offload;
  StepConfig train;
  CheckpointConfig checkpoint;
  LogConfig log;
  std::string out;
  bool plan = false;          ///< say what would be done, and end
  bool audit = false;         ///< compare what is done with the plan
  RatesConfig rates;          ///< of both
  std::string memory_budget;  ///< of a rank's device, such as "40GiB"; empty: none
  bool memory_check = true;   ///< refuse what the memory of this machine cannot hold

  /// Registers every field under its name. The initial values are the defaults.
  void add_to(FlagSet& flags);
  /// Throws InvalidArgument for values that contradict each other or would have no effect. `flags`
  /// tells which were asked for.
  void validate(const FlagSet& flags) const;
  /// Throws InvalidArgument if train.recompute asks for more blocks than a model has.
  void check_blocks(std::int64_t num_blocks) const;
  /// For `num_ranks` ranks. Throws InvalidArgument for what does not fit them.
  shard::FsdpOptions fsdp_options(int num_ranks) const;
  std::chrono::milliseconds deadline() const { return parallel.deadline(); }
  /// memory_budget in bytes; 0: none. Throws InvalidArgument if it says no size.
  std::int64_t memory_limit_nbytes() const;
  /// See LogConfig::traced().
  StepRange trace_steps(std::int64_t start = 0) const { return log.traced(train.steps, start); }
  /// See LogConfig::probed().
  StepRange probe_steps(std::int64_t start = 0) const { return log.probed(train.steps, start); }
};

}  // namespace tessera::tools

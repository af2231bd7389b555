// What the trainers share of their configuration: flags and TOML keys of the same names.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/stream.h"
#include "shard/options.h"
#include "tools/cli/flags.h"
#include "tools/config/checkpoint_config.h"
#include "tools/config/comm_config.h"
#include "tools/config/rates_config.h"
#include "tools/models/model.h"

namespace tessera::tools {

enum class OptimizerKind { kAdamW, kSgd };
enum class ScheduleKind { kConstant, kCosine, kLinear };
/// Whether steps on a GPU are CUDA graphs; see graph_choice.h.
enum class GraphChoice { kAuto, kOn, kOff };
/// When gradients are reduced under accumulation: last keeps them whole until the last micro-step.
enum class AccumComm { kEvery, kLast };
/// Updates beside the last backward of a step; see shard::UpdateGathers.
enum class OverlapOptimizer { kNone, kBackward, kInterleaved };
enum class DeviceChoice { kAuto, kCpu, kCuda };
enum class BackendChoice { kAuto, kThreads, kNccl };

/// What is left open here, Ranks decides for a machine: see ranks.h.
struct ParallelConfig {
  std::int64_t ranks = 0;         ///< 0: one a GPU, or `cpu_ranks`
  std::int64_t cpu_ranks = 4;     ///< the program's own, no flag
  std::int64_t max_ranks = 1024;  ///< the program's own, no flag: of threads
  std::int64_t local_ranks = 0;   ///< what Ranks says, no flag: of this process; 0: all
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

  /// What `strategy` stands for; other options may change it, see TrainConfig::fsdp_options().
  shard::Placement preset() const { return shard::Placement::preset(strategy); }
};

/// See engine/isa.h and engine/gemm/gemm.h.
struct CpuConfig {
  std::string isa = "auto";
  std::string gemm = "auto";
  std::int64_t threads_per_rank = 1;
  bool pin = false;
};

/// See gemm_choice.h and graph_choice.h.
struct CudaConfig {
  GraphChoice graph = GraphChoice::kAuto;
  bool tune_gemm = true;
  std::string gemm_algorithms;  ///< file; empty: gemm_algorithms.txt in the output folder
};

/// See shard::OffloadOptions.
struct OffloadConfig {
  double parameters = 0, gradients = 0, optimizer = 0;
  std::int64_t threads = 0;  ///< 0: as many as usable cores, shared by the ranks of a process

  bool any() const { return parameters > 0 || gradients > 0 || optimizer > 0; }
};

struct StepConfig {
  std::int64_t steps = 0;
  std::int64_t batch = 0;  ///< per rank and micro-step
  std::int64_t accum = 1;
  AccumComm accum_comm = AccumComm::kEvery;
  std::int64_t seed = 1337;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double lr = 0;
  double momentum = 0.9;
  double weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.99, eps = 1e-8;
  OverlapOptimizer overlap_optimizer = OverlapOptimizer::kNone;
  double grad_clip = 1;        ///< 0: off
  std::int64_t max_skips = 0;  ///< updates in a row, for gradients that are not finite
  bool check_gradients = false;
  double max_minutes = 0;         ///< of training; 0: no limit
  double spike_factor = 0;        ///< of the median loss; 0: off. See step_guard.h
  std::int64_t verify_every = 0;  ///< steps; 0: off. The same
  std::int64_t warmup = 0;
  ScheduleKind schedule = ScheduleKind::kCosine;
  Recompute recompute = false;

  /// Whether some steps may be made twice.
  bool guards() const { return spike_factor > 0 || verify_every > 0; }
  /// Learning rate of `step` (from 0): linear warmup, then the schedule down to 0 at `steps`.
  double lr_at(std::int64_t step) const;
};

struct LogConfig {
  std::int64_t every = 10;     ///< steps between lines on the terminal; 0: none
  std::int64_t val_every = 0;  ///< steps between validations; 0: at the end only
  std::string jsonl;           ///< empty: log.jsonl in the output folder
  std::string trace;           ///< file; empty: none
  std::string trace_steps = "auto";
  std::string probe;                 ///< file; empty: none
  std::string probe_steps = "auto";  ///< auto: every step
  std::string probe_values;          ///< what to keep whole; empty: nothing
  std::string tensorboard;           ///< a folder; empty: none
  std::int64_t peak_ms = 50;         ///< to measure the peak of matrix products; 0: not at all
};

/// First and last, from 1; none if `last` is smaller.
struct StepRange {
  std::int64_t first = 1, last = 0;
};

/// "the run ended before the end of step 3": why a process that went on after step `start`
/// has recorded none of `steps`, as trace_steps(start) says them.
std::string why_none_of(const StepRange& steps, std::int64_t start);

/// What the option data.path leads to, or, without one, `supplied`: data that `bazel run` lays
/// where the program starts. Throws IoError that says how to get data where that is missing.
std::string data_path(const std::string& option, const std::string& supplied,
                      std::string_view how_to_get);

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
  std::chrono::milliseconds deadline() const;
  /// memory_budget in bytes; 0: none. Throws InvalidArgument if it says no size.
  std::int64_t memory_limit_nbytes() const;
  /// What log.trace_steps says to a process that goes on after step `start`: of the steps
  /// that it names those after `start`. Throws InvalidArgument for steps that the run does not
  /// have.
  StepRange trace_steps(std::int64_t start = 0) const;
  /// What log.probe_steps says to a process that goes on after step `start`; see trace_steps().
  StepRange probe_steps(std::int64_t start = 0) const;

 private:
  // What parallel.reshard_after_forward says; see train_config.cc.
  int reshard_ranks() const;
  // Of each rank, of `num_ranks`.
  int offload_threads(int num_ranks) const;
};

}  // namespace tessera::tools

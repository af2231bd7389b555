// What training would do, found by making two of its steps on a device that is not there (see
// engine/meta.h): the same trainer, sharding and model, without memory, data or peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/gemm/gemm_cuda.h"
#include "engine/meta.h"
#include "engine/tape.h"
#include "tools/config/train_config.h"
#include "tools/models/model.h"
#include "tools/planning/plan_memory.h"
#include "tools/report/step_record.h"
#include "tools/trace/trace_events.h"
#include "tools/train/batch_loader.h"
#include "tools/train/unrecorded_pass.h"

namespace tessera::tools {

/// Where the training would run.
struct PlanTarget {
  int num_ranks = 1;
  int rank = 0;  ///< whose plan it is
  bool on_gpus = false;
  bool sums_in_rank_order = true;  ///< false: NCCL in its own order
  bool stages = false;    ///< reductions need memory besides their tensors (comm/staging.h)
  int num_processes = 1;  ///< that have as many ranks each
  engine::MetaRates rates = {};
  /// Is given the GPU's matrix products, each once; see engine::record_gemms(). Null: not asked
  /// for.
  std::shared_ptr<std::vector<engine::DeviceProduct>> gemms = nullptr;

  /// Of each of several processes; 1 if there is one.
  int ranks_per_process() const { return num_processes > 1 ? num_ranks / num_processes : 1; }
};

/// How much there is at most, with what lies between steps.
struct PlannedPass {
  std::string name;
  std::int64_t nbytes;
};

struct PlannedCollective {
  std::string name;         ///< "all_gather"
  std::string label;        ///< "h.0 forward"
  std::int64_t bytes_sent;  ///< by one rank
  std::size_t group;        ///< of TrainPlan::groups
  double end_ms;            ///< from the start of the step
  double exposed_ms = 0;    ///< while compute waits, of what it was on the link for
  /// What a process sends to others on average, with groups like this one that other ranks of it
  /// are in; 0 in one process.
  std::int64_t bytes_between = 0;

  /// Whether compute waits for what is shown as 0.001 ms or more.
  bool is_exposed() const { return exposed_ms > 0.0005; }
};

/// Of one rank: others may hold more or less; see rank_kind().
struct TrainPlan {
  std::uint64_t hash;              ///< that ranks agree on
  std::vector<std::string> facts;  ///< that the hash is of
  /// The first and the second: later ones are as the second. Where a hook compresses later ones,
  /// then also the first that it does and the second. Without values. See planned_step().
  std::vector<StepRecord> steps;
  std::int64_t compresses_after = 0;  ///< a hook compresses later steps; 0: all are alike
  std::vector<StepRecord> resumed;    ///< the first two of a run that goes on after that
  /// A step that a guard has made again, but not the run's first; empty without a guard.
  std::optional<StepRecord> repeated;
  std::vector<PlannedMemory> memory;           ///< of the last of `steps`, as what follows
  std::vector<PlannedMemory> host_memory;      ///< where offloaded state lies
  std::string peak_at;                         ///< the launch that needs most: "h.3 linear.forward"
  std::vector<PlannedCollective> collectives;  ///< in the order of calls
  std::vector<std::vector<int>> groups;        ///< ranks that `collectives` go between, each once
  /// Most between steps: a whole f32 parameter besides the rest.
  std::int64_t between_steps_nbytes;
  std::vector<PlannedPass> unrecorded;  ///< as they were asked for
  bool uses_offload = false;            ///< whether a state, or a part of it, lies on the host
  std::int64_t num_launches;
  double host_ms;  ///< that this machine took to launch them
};

/// What is planned of a step, from 1, of a run that began after step `start`.
const StepRecord& planned_step(const TrainPlan& plan, std::int64_t step, std::int64_t start = 0);

/// Of a rank's device, over the whole run: steps, those that are made again, passes between them,
/// and whole parameters, as they are read at the end.
std::int64_t peak_nbytes(const TrainPlan& plan);

/// What may make plans of ranks differ: how much of each flat a rank owns, where it lies, and which
/// pieces of parameters it compresses. Ranks of one kind need the same memory. Empty where all are
/// of one kind: on CPUs, unless a part of a state is offloaded or PowerSGD compresses between
/// replicas alone. Costs a part of what a plan does. Throws as make_plan().
std::string rank_kind(const TrainConfig& config, const PlanTarget& target, Model& model);

/// Throws what the training would for a configuration that cannot run. `batch`: what the model's
/// loss takes. `trace`: is given the steps as a trace, in simulated time, and closed. `unrecorded`:
/// what else the training does with `model`.
TrainPlan make_plan(const TrainConfig& config, const PlanTarget& target, Model& model,
                    const std::vector<BatchTensor>& batch, TraceWriter* trace = nullptr,
                    const std::vector<UnrecordedPass>& unrecorded = {});

}  // namespace tessera::tools

// The training loop of one rank: engine, sharding and optimizer put together as the configuration
// says. The model and the data come in as blocks and functions.
//
// On a GPU the host waits for nothing inside a step, unless losses are sums, whose terms it adds up
// over ranks: see [Note: one step late] in trainer.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/host_gather.h"
#include "comm/process_group.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "tools/config/train_config.h"
#include "tools/probe/probe.h"
#include "tools/report/run_log.h"
#include "tools/trace/trace.h"
#include "tools/train/batch_loader.h"
#include "tools/train/graph_choice.h"
#include "tools/train/run_checkpoints.h"
#include "tools/train/step_clock.h"
#include "tools/train/step_guard.h"

namespace tessera::tools {

/// Who is told what a rank does; null: nobody. They outlive its trainer.
struct TrainerObservers {
  TraceRecorder* trace = nullptr;  ///< which the stream that computes tells as well
  Probe* probe = nullptr;
  std::shared_ptr<engine::MemoryListener> memory = {};       ///< of the rank's blocks
  std::shared_ptr<engine::MemoryListener> host_memory = {};  ///< of those of Fsdp::host_memory()
};

class Trainer {
 public:
  /// `compute`: see Ranks. `log` on rank 0, null elsewhere. Collective; see shard::Fsdp.
  Trainer(comm::ProcessGroup& world, const engine::Stream& compute, const TrainConfig& config,
          const std::vector<engine::Block*>& blocks, engine::Block* root, RunLog* log,
          const TrainerObservers& observers = {});

  comm::ProcessGroup& world() { return world_; }
  const TrainConfig& config() const { return config_; }
  engine::Tape& tape() { return tape_; }
  shard::Fsdp& fsdp() { return fsdp_; }

  /// Collective, before run(): saves checkpoints, and goes on from one, as configured. Returns
  /// where training starts.
  TrainPosition open_checkpoints(RunIdentity identity);

  /// What training reads. `fill` writes the micro-batch that starts at global sample
  /// `first_sample` to host memory, in a thread of its own; see BatchLoader.
  struct Data {
    std::vector<BatchTensor> tensors;
    std::function<void(std::int64_t first_sample, const Batch& host)> fill;
    /// How many targets of that micro-batch are learned: asked where losses are sums
    /// (StepConfig::sums_losses()).
    std::function<std::int64_t(std::int64_t first_sample)> num_targets = {};
  };
  /// Loss (f32 scalar) of that micro-batch: its mean, or where losses are sums its sum over targets
  /// that are learned. What it draws by sample it draws for those after
  /// `first_sample` + samples_before().
  using Loss = std::function<engine::Tensor(std::int64_t first_sample, const Batch& batch)>;
  struct Validation {
    double loss;                          ///< mean
    std::string remark;                   ///< for the terminal, after the loss
    std::string summary = "";             ///< a line for the end of the run; empty: none
    JsonRecord record = {};               ///< for the log
    std::vector<std::string> lines = {};  ///< for the terminal, after that of the loss
  };
  /// Null: none. Collective.
  using Validate = std::function<Validation()>;

  /// Runs all steps, or those until a probe has what it is after, and `validate` as configured.
  /// `items_per_sample`: tokens of a sample, or 1. When a rank finds that it was asked to stop
  /// (stop.h), all ranks end after that step, and without the last validation. Throws
  /// InvalidArgument naming step, micro-step (both from 1) and rank when a loss is not finite, and
  /// step and parameter when a gradient is not and no more updates may be skipped. Call once.
  void run(const Data& data, const Loss& loss, const Validate& validate,
           std::int64_t items_per_sample);
  /// Of a step that becomes a graph: (1) i64 on the GPU, see Pass::samples_before. Otherwise
  /// undefined.
  engine::Tensor samples_before() const;
  /// What train.max_minutes is measured with; otherwise the steady clock.
  void read_time_from(RunClock clock) { clock_ = std::move(clock); }
  /// Told of each step, in order.
  void on_step(std::function<void(const StepRecord&)> fn) { on_step_ = std::move(fn); }
  /// On a meta device (engine/meta.h): makes `num_steps` steps, of which nothing is read, and
  /// returns what is known of them without values: memory, traffic, and simulated times. Call once,
  /// instead of run(). `before_step` is called with each, from 0. `repeats_last`: the last one is
  /// made again, as by a guard, which the configuration must have.
  std::vector<StepRecord> plan(const std::vector<BatchTensor>& batch, const Loss& loss,
                               std::int64_t num_steps,
                               const std::function<void(std::int64_t step)>& before_step,
                               bool repeats_last = false);
  int num_optimizer_states() const;
  /// The signal that ended run() before its last step or validation, or that stops() found; 0:
  /// none.
  int stopped_by() const { return stopped_by_; }
  /// Collective: whether some rank was asked to stop. For work that runs while steps do, so that it
  /// ends.
  bool stops();
  /// Of which step the newest checkpoint is that this run has saved or went on from, if it saves
  /// any.
  std::optional<std::int64_t> saved_step() const {
    return checkpoints_ ? checkpoints_->newest_step() : std::nullopt;
  }
  /// How run() ended, for the last record of the log: steps, and the signal if one ended it.
  JsonRecord end_record() const;
  /// The last one, if any.
  const std::optional<Validation>& validation() const { return validation_; }

  /// Collective: every rank's `values`, rank by rank.
  std::vector<float> gather(const std::vector<float>& values);
  /// Mean of `num_batches` losses, or where each is a sum, of the `num_terms` of all of them: batch
  /// b is evaluated by rank b % ranks and summed in the order of b, so the result does not depend
  /// on the number of ranks. Not recorded. Collective. When a rank is asked to stop it throws on
  /// all of them, which run() catches.
  double mean_loss(std::int64_t num_batches,
                   const std::function<engine::Tensor(std::int64_t batch)>& loss,
                   std::optional<std::int64_t> num_terms = {});
  /// Collective: SHA-256 of all f32 parameters in name order, in hex. Throws InvalidArgument naming
  /// a parameter that is not finite.
  std::string params_sha256();

 private:
  /// A step that was launched, and what is known once it has been done.
  struct Launched {
    StepRecord record;
    StepClock clock;
    comm::HostGather values;  // losses and the wish to stop
    shard::GradNorm norm;
    double num_loss_terms;
    bool is_graph;
  };
  /// [Note: steps as graphs] in trainer_graph.cc.
  struct StepGraph {
    std::vector<Batch> batches;  // of each micro-step
    engine::Tensor losses;       // of each micro-step
    engine::Tensor samples_before;
    std::int64_t captured_step = 0;
    bool is_capturing = false, has_failed = false;
    std::optional<shard::GradNorm> norm;
    std::function<void()> launch;  // null: not captured yet
  };
  /// Ends a validation.
  struct Stopped : std::exception {
    const char* what() const noexcept override { return "[train] asked to stop"; }
  };
  std::int64_t first_sample(std::int64_t batch) const;
  double num_loss_terms() const;
  std::int64_t num_steps_to_run() const;
  bool is_validation_due(std::int64_t step) const;
  bool owes_validation();
  TrainPosition after(std::int64_t steps) const;
  int why_to_stop() const;
  void stop(int why);
  bool uses_host_memory() const {
    return fsdp_.offload() != nullptr || config_.comm.powersgd.offload_error;
  }
  /// `finish_last`: reads and logs the step before, unless that is done.
  Launched launch(std::int64_t step, const Loss& loss, const std::function<void()>& finish_last);
  // The batch of a micro-step of the step at work.
  using NextBatch = std::function<const Batch&(std::int64_t micro)>;
  shard::GradNorm run_passes(std::int64_t step, const Loss& loss, const engine::Tensor& values,
                             const NextBatch& next, StepClock* clock);
  void create_graph(const std::vector<BatchTensor>& tensors);
  bool captures(std::int64_t step, const Loss& loss);
  void capture(std::int64_t step, const Loss& loss);
  shard::GradNorm run_graph(std::int64_t step, const engine::Tensor& values, StepClock& clock);
  shard::GradNorm guard(std::int64_t step, const Loss& loss, const engine::Tensor& values,
                        shard::GradNorm first, std::string& replayed,
                        const std::function<void()>& finish_last);
  void plan_guard(std::int64_t step, const Loss& loss, const engine::Tensor& values,
                  std::optional<shard::GradNorm>& norm);
  void repeat_passes(std::int64_t step, const Loss& loss, const engine::Tensor& values,
                     std::optional<shard::GradNorm>& norm);
  comm::HostGather start_gather(const std::vector<float>& values);
  /// Starts peaks of memory again.
  void begin_peaks();
  void record_memory(StepRecord& record);
  void finish(Launched& launched, double items);
  void validate_after(std::int64_t step, const Validate& validate);
  /// `step` from 1, as `micro` is.
  std::string count_skip(const shard::GradNorm& norm, std::int64_t step);
  void check_loss(float loss, std::int64_t step, std::int64_t micro, int rank) const;

  comm::ProcessGroup& world_;
  const TrainConfig& config_;
  RunLog* log_;
  TraceRecorder* trace_;
  Probe* probe_;
  engine::Stream compute_;
  engine::Memory memory_;
  engine::Memory pinned_;
  // Gathers of losses: not on compute, so that waiting for them is counted.
  engine::Stream metrics_;
  engine::Tape tape_;
  std::function<std::int64_t(std::int64_t first_sample)> num_targets_;  // of Data
  std::unique_ptr<BatchLoader> batches_;  // dies after fsdp_, which ends what compute waits for
  shard::Fsdp fsdp_;
  std::unique_ptr<shard::Optimizer> optimizer_;
  std::unique_ptr<StepGraph> graph_;  // null: none; dies before what it uses
  std::optional<Validation> validation_;
  engine::MemoryStats peaks_, host_peaks_;  // before the step at work
  std::function<void(const StepRecord&)> on_step_;
  std::unique_ptr<RunCheckpoints> checkpoints_;  // null: none
  std::optional<StepGuard> guard_;
  std::optional<std::int64_t> repeated_;  // the step that plan() makes again
  TrainPosition start_;
  StepClock::Time last_end_;    // of the step before, if the next follows at once
  std::int64_t num_steps_ = 0;  // that are done, those before start_ too
  std::int64_t num_skips_ = 0;  // in a row
  RunClock clock_ = std::chrono::steady_clock::now;
  std::chrono::steady_clock::time_point begin_;  // of run()
  int stopped_by_ = 0;
};

/// The elements of an f32 or bf16 tensor, for the host. Blocks; see engine::to_vector().
std::vector<float> to_floats(const engine::Tensor& t);

/// The largest divisor of `n` that is at most `most`: a batch size that leaves no remainder.
std::int64_t largest_divisor(std::int64_t n, std::int64_t most);

}  // namespace tessera::tools

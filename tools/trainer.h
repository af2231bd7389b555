// The training loop of one rank: engine, sharding and optimizer put together as the configuration
// says. The model and the data come in as blocks and functions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/optimizer.h"
#include "tools/run_log.h"
#include "tools/train_config.h"

namespace tessera::tools {

class Trainer {
 public:
  /// `log` on rank 0, null elsewhere. Collective; see shard::Fsdp.
  Trainer(comm::ProcessGroup& world, const TrainConfig& config,
          const std::vector<engine::Block*>& blocks, engine::Block* root, RunLog* log);

  comm::ProcessGroup& world() { return world_; }
  engine::Tape& tape() { return tape_; }
  shard::Fsdp& fsdp() { return fsdp_; }

  /// Mean loss (f32 scalar) of the micro-batch that starts at global sample `first_sample`.
  using Loss = std::function<engine::Tensor(std::int64_t first_sample)>;
  /// A validation; null: none. Collective; returns its mean loss and a remark for the terminal.
  struct Validation {
    double loss;
    std::string remark;
  };
  using Validate = std::function<Validation()>;

  /// Runs all steps, and `validate` as configured. `items_per_sample`: tokens of a sample, or 1.
  /// Throws InvalidArgument naming step and rank when a loss is not finite.
  void run(const Loss& loss, const Validate& validate, std::int64_t items_per_sample);
  /// Of the last validation, if any.
  std::optional<double> val_loss() const { return val_loss_; }

  /// Collective: every rank's `values`, rank by rank.
  std::vector<float> gather(const std::vector<float>& values);
  /// Mean of `num_batches` losses: batch b is evaluated by rank b % ranks and summed in the order
  /// of b, so the result does not depend on the number of ranks. Not recorded. Collective.
  double mean_loss(std::int64_t num_batches,
                   const std::function<engine::Tensor(std::int64_t batch)>& loss);
  /// Collective: SHA-256 of all f32 parameters in name order, in hex.
  std::string params_sha256();

 private:
  double train_step(std::int64_t step, const Loss& loss, StepRecord& record);

  comm::ProcessGroup& world_;
  const TrainConfig& config_;
  RunLog* log_;
  engine::Memory memory_;
  engine::Stream compute_;
  engine::Stream metrics_;  // gathers of losses, beside compute so that waiting for them is counted
  engine::Tape tape_;
  shard::Fsdp fsdp_;
  std::unique_ptr<shard::Optimizer> optimizer_;
  std::optional<double> val_loss_;
};

/// The largest divisor of `n` that is at most `most`: a batch size that leaves no remainder.
std::int64_t largest_divisor(std::int64_t n, std::int64_t most);

}  // namespace tessera::tools

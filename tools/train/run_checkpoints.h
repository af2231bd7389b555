// The checkpoints of a training: where it goes on from, and what it leaves.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/fsdp.h"
#include "shard/optimizer/optimizer.h"
#include "tools/config/train_config.h"
#include "tools/report/run_log.h"

namespace tessera::tools {

/// How far a training has come.
struct TrainPosition {
  std::int64_t step = 0;            ///< steps
  std::int64_t sample = 0;          ///< global samples
  std::int64_t num_skips = 0;       ///< updates in a row, the last ones
  std::vector<double> losses = {};  ///< the last ones that a StepGuard measures others against
};

/// What a checkpoint says of the run that saved it, besides tensors.
struct RunIdentity {
  std::string model;             ///< all that shapes do not tell; another one is refused
  std::string data;              ///< for people: what is read, and where
  std::string config;            ///< TOML; what differs is told
  std::string data_digest = {};  ///< see data_digest.h; another one is told. Empty: not known
  std::string arithmetic = {};   ///< see arithmetic.h; what differs is told
};

/// One rank's. Whatever is not const is collective.
class RunCheckpoints {
 public:
  /// All outlive this. `log` on rank 0, null elsewhere. Throws as shard::Checkpointer.
  RunCheckpoints(comm::ProcessGroup& world, shard::Fsdp& fsdp, shard::Optimizer& optimizer,
                 const TrainConfig& config, RunIdentity identity, RunLog* log);

  /// Loads what the option resume says, and tells. Throws InvalidArgument for a checkpoint of
  /// another model, naming the options that have changed since it was saved, and for a new run
  /// where there are checkpoints; otherwise as shard::Checkpointer.
  TrainPosition resume();
  /// Whether a checkpoint is due after `step` steps.
  bool is_due(std::int64_t step) const;
  /// Saves, unless that step was the last to be saved or none are.
  void save(const TrainPosition& position);
  /// Between steps, where a save may be at work.
  void poll();
  /// Ends the save at work, and tells of it.
  void finish();
  /// The newest that is whole; empty: none.
  const std::string& newest() const { return newest_; }
  /// The step of the newest that this run has saved or went on from, if it saves any.
  std::optional<std::int64_t> newest_step() const { return newest_step_; }

 private:
  void say(const std::string& line, Console::Style style = Console::Style::kPlain) const;
  void warn(std::string_view line) const;
  void told(std::optional<std::int64_t> step);
  void check_is_new();
  bool is_one_checkpoint(const std::string& path) const;
  void tell_changes(const shard::LoadedCheckpoint& loaded) const;
  std::optional<shard::LoadedCheckpoint> load();
  TrainPosition take_over(const shard::LoadedCheckpoint& loaded);

  comm::ProcessGroup& world_;
  const TrainConfig& config_;
  const RunIdentity identity_;
  RunLog* const log_;
  std::vector<shard::CheckpointPart> parts_;
  std::string folder_;
  std::unique_ptr<shard::Checkpointer> checkpointer_;  // null: nothing is saved
  std::int64_t last_saved_ = -1;
  std::string newest_;
  std::optional<std::int64_t> newest_step_;
};

}  // namespace tessera::tools

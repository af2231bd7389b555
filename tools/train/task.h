// What one training program does of its own: a model, data, and what to make of the trained model.
// run_task() does the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"
#include "tools/config/train_config.h"
#include "tools/models/model.h"
#include "tools/report/run_log.h"
#include "tools/train/trainer.h"
#include "tools/train/unrecorded_pass.h"

namespace tessera::tools {

/// One rank's part, in that rank's thread. Whatever uses a Trainer or a RunLog (null but on rank 0)
/// is collective.
class TaskRank {
 public:
  virtual ~TaskRank() = default;

  virtual Model& model() = 0;
  /// What training sends through: `world`, or a group of its own around it
  /// (comm/forwarding_group.h) that this keeps.
  virtual comm::ProcessGroup& group(comm::ProcessGroup& world) { return world; }
  /// The model was wrapped: sets parameters that do not start from the seed.
  virtual void load(Trainer& /*trainer*/, RunLog* /*log*/) {}
  virtual Trainer::Data data() = 0;
  /// Null: none.
  virtual Trainer::Validate validation(Trainer& trainer) = 0;
  /// What a batch of it does, for a plan of its memory; empty: no validation.
  virtual std::vector<UnrecordedPass> unrecorded_passes() { return {}; }
  /// After the last step: saves the model, samples from it. Returns the sample; empty: none.
  virtual std::string finish(Trainer& /*trainer*/, RunLog* /*log*/) { return ""; }
};

/// What the ranks share: read by all of them at once while they run.
class Task {
 public:
  virtual ~Task() = default;

  /// The configuration's flags.
  virtual void add_to(FlagSet& flags) = 0;
  virtual const TrainConfig& config() const = 0;
  /// To be changed before rank(), as a memory budget asks for.
  virtual TrainConfig& config() = 0;
  /// `flags` were parsed and config() is valid: reads what training needs, and throws if the run
  /// could not end well. Changes no file.
  virtual void prepare(const FlagSet& flags, bool on_gpus) = 0;

  // For a prepared task.

  /// What the rate of progress counts, in plural, and how many of it make a sample.
  struct Items {
    std::string name;
    std::int64_t per_sample;
    double flops;  ///< of one of them, forward and backward, without what is recomputed; 0: unknown
  };
  virtual Items items() const = 0;
  /// How many samples come once before one comes again; 0: not to be said in one number.
  virtual std::int64_t num_samples() const = 0;
  /// A line for the terminal: model and data.
  virtual std::string summary() const = 0;
  /// Warnings of what may be meant otherwise, a line each.
  virtual std::vector<std::string> warnings() const { return {}; }
  /// What makes the model what it is, in words: a checkpoint of another one is refused.
  virtual std::string model_text() const = 0;
  /// For people: what the data are, and where.
  virtual std::string data_text() const = 0;
  /// What makes the data what they are, wherever they lie: see data_digest.h. Reads them.
  virtual std::string data_digest() const = 0;
  /// Besides the data: what every process reads for itself, and must have found the same.
  virtual std::vector<RunFile> files_read() const { return {}; }
  virtual bool samples() const { return false; }
  virtual std::unique_ptr<TaskRank> rank() const = 0;
  /// The last line for the terminal; empty: none. `checkpoint`: of which step the run's last
  /// checkpoint is, if it has saved one.
  virtual std::string closing_line(std::optional<std::int64_t> /*checkpoint*/) const { return ""; }
};

}  // namespace tessera::tools

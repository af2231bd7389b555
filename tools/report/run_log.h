// What a run tells: progress lines with an estimate of the time left, a JSON line per step, scalars
// for TensorBoard if asked for, and a summary at the end. Rank 0 has one.
//
// [Note: output never ends a training]
// Lines are written in the background. A terminal that is paused holds up nothing; a disk that is
// full, a terminal that has gone, or a reader that is 16 MiB behind loses lines and nothing else:
// rank 0 says so once on stderr, the training goes on, the model is saved, and finish() then fails,
// so that the program ends with an error. Only a pipe whose reader has gone asks the training to
// end after the step (`| head`).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/cli/background_writer.h"
#include "tools/cli/console.h"
#include "tools/cli/run_files.h"
#include "tools/config/train_config.h"
#include "tools/io/jsonl.h"
#include "tools/report/run_clock.h"
#include "tools/report/run_summary.h"
#include "tools/report/step_record.h"
#include "tools/report/tensorboard.h"

namespace tessera::tools {

class RunLog {
 public:
  /// Makes the output folder and opens the log; what an earlier run left there stays until begin().
  /// Throws IoError naming the path, also when another run is writing to the folder or the log.
  RunLog(const TrainConfig& config, std::string items, std::string config_toml = "",
         RunClock clock = std::chrono::steady_clock::now);

  /// The files that a run with `config` writes to, by the option that says where.
  static std::vector<RunFile> outputs(const TrainConfig& config);
  /// The lock of its output folder, of which it writes nothing.
  static RunFile lock_of(const TrainConfig& config);
  /// Before the first is written: throws InvalidArgument when one of outputs() is one of `read`,
  /// the file of --config, the folder's lock or where checkpoints are, the log is another
  /// output, or one would replace what no run has written (check_run_folder()). A run may repeat
  /// one from its config.toml.
  static void check_outputs(const TrainConfig& config, const FlagSet& flags,
                            std::span<const RunFile> read);

  const std::string& folder() const { return folder_; }
  const std::string& jsonl_path() const { return jsonl_path_; }
  /// The run has begun, after `start` steps of an earlier one: writes config.toml, and of the log
  /// keeps the records of these.
  void begin(std::int64_t start = 0);
  /// Whether begin() has ended: no step was made before.
  bool has_begun() const { return has_begun_; }
  /// From here on steps say what part of `peak_flop_per_s`, of all ranks together, the model's own
  /// operations are: `flops_per_item` of forward and backward, without what is recomputed.
  void set_rates(double flops_per_item, double peak_flop_per_s);
  /// Writes `text` to a file of the output folder, whole or not at all.
  void write_file(const std::string& name, const std::string& text) const;

  // Among these only flush() and finish() throw for output that is lost.

  /// A line for the terminal.
  void say(const std::string& line, Console::Style style = Console::Style::kPlain);
  /// On a terminal with a status line, unless the run is asked to stop.
  void step(const StepRecord& record);
  /// No step follows: takes the status line away.
  void end_steps() { console_.status(""); }
  /// A line for the terminal, with `remark`, and a record of its own, but not after the last step,
  /// whose validation is in the record of finish().
  void validation(std::int64_t step, double val_loss, const std::string& remark,
                  const JsonRecord& extra = {});
  /// Whether the log had the validation after that step when this run began.
  bool has_validation(std::int64_t step) const { return last_validation_ == step; }
  /// Of the steps so far: what the plan says of each. See RunSummary::add_plan().
  void add_plan(const std::function<const StepRecord&(std::int64_t step)>& planned) {
    summary_.add_plan(planned);
  }
  /// What records of steps have besides, asked for at the end of each.
  void add_to_steps(std::function<JsonRecord()> more) { more_ = std::move(more); }
  /// Tells on the terminal what the steps were like, who was late if somebody was, and `advice`.
  void summary(const std::string& late, const std::vector<std::string>& advice);
  /// Of the steps so far, if any.
  std::optional<RunSummary::Figures> figures() const { return summary_.figures(); }
  /// Waits until all is written, but after a request to stop not for a reader that does not read.
  /// Throws IoError naming what was lost.
  void flush();
  /// Writes the last record and waits until all is written. Throws IoError naming what was lost.
  void finish(const std::string& params_sha256, std::optional<double> val_loss,
              const JsonRecord& extra);

 private:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void check_output();
  std::string time_left(std::int64_t step) const;
  std::optional<double> peak_percent(const StepRecord& record) const;

  std::int64_t start_ = 0, num_steps_;
  std::int64_t every_;
  std::string items_;
  std::string config_toml_;
  std::string folder_;
  // Of a file of its own: config.toml is replaced, the log may be elsewhere.
  engine::FileDescriptor folder_lock_;
  std::string jsonl_path_;
  JsonlWriter jsonl_file_;
  BackgroundWriter jsonl_;
  Console console_;
  std::unique_ptr<TensorBoardLog> tensorboard_;  // null: none
  std::function<JsonRecord()> more_;
  bool has_begun_ = false;
  bool told_jsonl_ = false, told_console_ = false, told_tensorboard_ = false;
  RunSummary summary_;
  double peak_items_per_s_ = 0;       // 0: unknown
  std::int64_t last_validation_ = 0;  // of an earlier run; 0: none
  RunClock clock_;
  std::chrono::steady_clock::time_point start_time_;
};

}  // namespace tessera::tools

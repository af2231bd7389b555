// The trace of a run: one file for all ranks of a process, written in the background as the log is;
// see [Note: output never ends a training] in run_log.h.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tools/cli/background_writer.h"
#include "tools/config/train_config.h"
#include "tools/io/jsonl.h"
#include "tools/report/local_ranks.h"
#include "tools/trace/trace.h"

namespace tessera::tools {

class RunTrace {
 public:
  /// For a `config` that asks for a trace, which outlives this. What an earlier run left in the
  /// file stays until there is something to put in its place. Throws IoError naming the path when
  /// it cannot be written, or another run does.
  RunTrace(const TrainConfig& config, const LocalRanks& ranks);
  /// However the run ended, a file that was made for it and got no step goes.
  ~RunTrace();
  RunTrace(const RunTrace&) = delete;
  RunTrace& operator=(const RunTrace&) = delete;

  /// Of a rank of this process, for its streams and its trainer.
  TraceRecorder& recorder(int rank) { return *recorders_[ranks_.index(rank)]; }
  /// Of each rank, in its thread and before its first step: the run goes on after step `start`.
  void start_after(std::int64_t start, int rank);
  /// The run has begun: what is traced may be written now.
  void begin();

  // The ranks have ended, and their streams are gone.

  /// The end of the file. If no step was traced an older one stays.
  void close();
  /// Ends the file after an error, if there is memory for that, so that one can see what led there.
  void keep() noexcept;
  /// A line for the terminal: where it is, and how much communication was hidden, or why it is not
  /// written.
  std::string summary() const;
  /// What summary() says, for the last record of the log: of each step the mean over ranks.
  JsonRecord record() const;
  /// Waits until all is written. Throws IoError naming what was lost.
  void flush();

 private:
  void write(std::string text);
  void put(std::string text);  // under the mutex
  void warn(const std::string& what);
  std::int64_t num_lost() const;

  const TrainConfig& config_;
  const LocalRanks ranks_;
  std::string path_;
  bool has_older_;
  JsonlWriter file_;  // opened, locked and emptied as a log
  BackgroundWriter background_;
  TraceWriter writer_;
  std::vector<std::unique_ptr<TraceRecorder>> recorders_;

  StepRange steps_;  // of the first rank, as start_
  std::int64_t start_ = 0;

  std::mutex mutex_;
  bool has_begun_ = false;
  std::string held_;         // until begin(): other ranks may be ahead of the one that calls it
  bool is_written_ = false;  // the older file is gone
  bool is_closed_ = false;
  std::string error_;  // why it could not go
  bool told_ = false;
};

}  // namespace tessera::tools

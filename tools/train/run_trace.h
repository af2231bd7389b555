// The trace of a run: one file for all ranks, written in the background as the log is; see
// [Note: output never ends a training] in run_log.h.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tools/io/jsonl.h"
#include "tools/trace/trace.h"
#include "tools/train/background_writer.h"
#include "tools/train/train_config.h"

namespace tessera::tools {

class RunTrace {
 public:
  /// For a `config` that asks for a trace. What an earlier run left in the file stays until
  /// begin(). Throws IoError naming the path when it cannot be written, or another run does.
  RunTrace(const TrainConfig& config, int num_ranks);
  RunTrace(const RunTrace&) = delete;
  RunTrace& operator=(const RunTrace&) = delete;

  /// Of a rank, for its streams and its trainer.
  TraceRecorder& recorder(int rank) { return *recorders_[static_cast<std::size_t>(rank)]; }
  /// The run has begun: empties the file. What is traced before is written then.
  void begin();

  // The ranks have ended, and their streams are gone.

  /// The end of the file.
  void close();
  /// A line for the terminal: where it is, and how much communication was hidden.
  std::string summary() const;
  /// The same for the last record of the log: of each step the mean over ranks.
  JsonRecord record() const;
  /// Waits until all is written. Throws IoError naming what was lost.
  void flush();

 private:
  void write(std::string text);
  std::int64_t num_lost() const;

  std::string path_;
  JsonlWriter file_;  // opened, locked and emptied as a log
  BackgroundWriter background_;
  TraceWriter writer_;
  std::vector<std::unique_ptr<TraceRecorder>> recorders_;

  std::mutex mutex_;
  bool has_begun_ = false;
  std::string held_;  // until begin(): other ranks may be ahead of the one that calls it
  bool told_ = false;
};

}  // namespace tessera::tools

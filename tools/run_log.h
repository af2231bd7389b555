// What a run tells: progress lines with an estimate of the time left, and a JSON line a step.
// Rank 0 has one.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "engine/memory.h"
#include "tools/jsonl.h"
#include "tools/train_config.h"

namespace tessera::tools {

/// One step as it was.
struct StepRecord {
  std::int64_t step = 0;  ///< from 0
  double loss = 0;        ///< mean over the global batch, before the update
  float grad_norm = 0;    ///< of the mean gradient, before clipping
  double lr = 0;
  double step_ms = 0;
  double items_per_s = 0;      ///< tokens, or samples
  double exposed_comm_ms = 0;  ///< compute waiting for collectives
  engine::MemoryStats memory = {};
};

class RunLog {
 public:
  /// Makes the output folder and opens the log. Throws IoError naming the path.
  RunLog(const TrainConfig& config, std::string items);

  const std::string& folder() const { return folder_; }
  const std::string& jsonl_path() const { return jsonl_path_; }
  /// Writes `text` to a file of the output folder, whole or not at all.
  void write_file(const std::string& name, const std::string& text) const;

  void step(const StepRecord& record);
  void validation(std::int64_t step, double val_loss, const std::string& extra);
  void finish(const std::string& params_sha256, std::optional<double> val_loss,
              const JsonRecord& extra);

 private:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::int64_t num_steps_;
  std::int64_t every_;
  std::string items_;
  std::string folder_;
  std::string jsonl_path_;
  JsonlWriter jsonl_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace tessera::tools

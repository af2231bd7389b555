// A run's scalars for TensorBoard: loss, grad_norm, lr, times, speed, memory by category, val_loss.
// What cannot be written is lost and told, and never ends a training: see run_log.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "engine/io/file.h"
#include "tools/cli/background_writer.h"
#include "tools/report/step_record.h"

namespace tessera::tools {

class TensorBoardLog {
 public:
  /// Makes `folder` and in it an empty file, under a name that TensorBoard finds and no other run
  /// has. Files of earlier runs stay; TensorBoard shows the last. `items`: what items_per_s counts.
  /// Throws IoError naming the path.
  TensorBoardLog(const std::string& folder, std::string items);
  /// Removes the file if the run has not begun.
  ~TensorBoardLog();
  TensorBoardLog(const TensorBoardLog&) = delete;
  TensorBoardLog& operator=(const TensorBoardLog&) = delete;

  const std::string& path() const { return path_; }
  void begin(std::int64_t first_step);
  /// `peak_percent`: as RunSummary::add().
  void step(const StepRecord& record, std::optional<double> peak_percent);
  void validation(std::int64_t step, double val_loss);

  /// As of BackgroundWriter.
  const BackgroundWriter& writer() const { return writer_; }
  void flush(const BackgroundWriter::Hurries& hurries) { writer_.flush(hurries); }

 private:
  TensorBoardLog(std::pair<std::string, engine::FileDescriptor> file, std::string items);

  std::string items_;
  std::string path_;
  engine::FileDescriptor file_;
  bool has_begun_ = false;
  BackgroundWriter writer_;
};

}  // namespace tessera::tools

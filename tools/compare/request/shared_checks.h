// What the configurations of a comparison share is looked at once.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tools/cli/run_files.h"
#include "tools/config/device_config.h"
#include "tools/models/family.h"
#include "tools/programs/transformer_config.h"

namespace tessera::tools {

class SharedChecks {
 public:
  /// Throws InvalidArgument for one that this machine is not, and DeviceError if no process can
  /// start to try it: the CPU is chosen once in a process.
  void cpu(const CpuConfig& cpu);
  /// Throws as TransformerConfig::dataset(); what it warns of goes to stderr.
  void data(TransformerConfig& config, const ModelConfig& model);
  /// For Request::inputs.
  void files(const std::vector<RunFile>& files);
  const std::vector<RunFile>& inputs() const { return inputs_; }

 private:
  std::set<std::string> cpus_, data_, warnings_, paths_;
  std::vector<RunFile> inputs_;
};

}  // namespace tessera::tools

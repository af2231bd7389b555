// The options of compare besides those of its trainings.
#pragma once

#include <cstdint>
#include <string>

#include "tools/cli/flags.h"

namespace tessera::tools {

struct CompareConfig {
  std::string strategies = "ddp,zero1,zero2,zero3";
  std::string sweep;
  std::string find_divergence;  ///< two of them, kPairSeparator between; empty: not asked for
  std::int64_t rounds = 1;
  std::int64_t warmup_steps = 3;
  double tolerance = 0.05;
  bool resume = false;
  std::string launch;  ///< empty: each training is one process
  std::string report;  ///< empty: report.html in the output folder
  std::string trainer = "tools/programs/train_transformer";
  std::string out = "runs/compare";

  void add_to(FlagSet& flags);
};

}  // namespace tessera::tools

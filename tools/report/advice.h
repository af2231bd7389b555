// What to try next, after a run: few rules, each with the figure that it follows from.
#pragma once

#include <string>
#include <vector>

#include "tools/config/train_config.h"
#include "tools/report/run_summary.h"

namespace tessera::tools {

/// Where the run was.
struct RunPlace {
  int num_ranks = 1;
  int num_gpus = 0;             ///< 0: the CPU
  int num_cores = 1;            ///< that the process may use
  int num_sharing = num_ranks;  ///< ranks that have only these cores
  int num_processes = 1;
};

/// What gives each step its samples with as many of `num_ranks` as `most`, or fewer:
/// "--parallel.ranks=2 --train.accum=2 (same bits)", of several processes "2 processes with ..." or
/// "--parallel.threads=2 ...".
std::string fewer_ranks(const TrainConfig& config, int num_ranks, int most, int num_processes = 1);

/// At most three, the most telling first; empty where nothing stands out. Fewer than 5 measured
/// steps say nothing.
std::vector<std::string> advice(const RunSummary::Figures& figures, const TrainConfig& config,
                                const RunPlace& place);

}  // namespace tessera::tools

// What one rank does of a training, in its own thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "comm/process_group.h"
#include "tools/io/jsonl.h"
#include "tools/programs/run/process_run.h"
#include "tools/report/late_ranks.h"
#include "tools/report/run_log.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

/// What came of it.
struct RankResult {
  std::int64_t start = 0;  ///< after which step the run began
  std::string params_sha256 = {};
  std::optional<Trainer::Validation> validation = {};
  std::string sample = {};
  std::optional<std::int64_t> checkpoint = {};  ///< see Task::closing_line()
  JsonRecord end = {};
  std::optional<LateRank> late = {};  ///< rank 0 knows it
};

/// Collective. `log`: null but on rank 0.
RankResult train_rank(comm::ProcessGroup& all, const ProcessRun& run, RunLog* log);

}  // namespace tessera::tools

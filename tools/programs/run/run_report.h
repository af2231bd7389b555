// What a run says and writes when it has ended well: rank 0 alone does.
#pragma once

#include "tools/programs/run/process_run.h"
#include "tools/programs/run/train_rank.h"
#include "tools/report/run_log.h"

namespace tessera::tools {

/// `result`: rank 0's. All ranks of this process have ended. Throws IoError naming what was lost.
void report_run(RunLog& log, const ProcessRun& run, const RankResult& result);

}  // namespace tessera::tools

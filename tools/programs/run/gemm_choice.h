// Which algorithms multiply matrices on the GPUs of a run: chosen by time before it, and kept,
// since another choice has other bits. See engine/gemm/gemm_algorithms.h.
#pragma once

#include <memory>

#include "comm/process_group.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/stream.h"
#include "tools/launch/ranks.h"
#include "tools/report/run_log.h"
#include "tools/train/task.h"

namespace tessera::tools {

/// What the file that the configuration of a prepared task names holds, and, with cuda.tune_gemm,
/// what is timed now and then kept there. Null on the CPU and where cublasLt's first proposals are
/// asked for. Tells `log`. Throws IoError naming the file, DeviceError.
std::shared_ptr<engine::GemmAlgorithms> choose_gemm_algorithms(const Task& task, const Ranks& ranks,
                                                               RunLog& log);

/// Of ranks of several processes: what rank 0 chooses, on all of them. `log`: rank 0's, null
/// elsewhere. Collective. Throws as choose_gemm_algorithms(), on rank 0.
std::shared_ptr<engine::GemmAlgorithms> share_gemm_algorithms(comm::ProcessGroup& world,
                                                              const engine::Stream& compute,
                                                              const Task& task, const Ranks& ranks,
                                                              RunLog* log);

}  // namespace tessera::tools

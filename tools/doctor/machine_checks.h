// The machine as a training finds it: processor, memory, limits.
#pragma once

#include <cstdint>
#include <string>

#include "tools/doctor/check.h"
#include "tools/machine/environment.h"
#include "tools/machine/limits.h"

namespace tessera::tools {

/// Chooses the instruction set as `environment` asks, and says it and the model of the processor;
/// kFail if TESSERA_CPU_ISA asks for what there is not. `root`: of /proc, as for read_limits().
Check check_cpu(const Environment& environment, const std::string& root = "");
/// Chooses who multiplies matrices as `environment` asks; kFail if TESSERA_CPU_GEMM or
/// TESSERA_CPU_THREADS cannot be honoured.
Check check_libraries(const Environment& environment);
/// kWarn where fewer than `num_ranks` can run at once, whatever the limit: affinity, a quota, or
/// the machine.
Check check_cores(const MachineLimits& limits, int num_ranks);
Check check_memory(const MachineLimits& limits);
Check check_huge_pages(const std::string& root = "");

/// What of the host's memory a model's offload takes, all ranks of the machine together, if all is
/// offloaded: f32 masters, gradients and AdamW's two moments.
std::int64_t offload_nbytes(std::int64_t num_parameters);
/// `limit_nbytes`: of memory that may be locked (ulimit -l), -1 for none. `model`: a name for
/// `num_parameters`.
Check check_locked_memory(std::int64_t limit_nbytes, const std::string& model,
                          std::int64_t num_parameters, bool has_gpu);
/// `limit`: of open files (ulimit -n), -1 for none.
Check check_open_files(std::int64_t limit);

/// RLIMIT_MEMLOCK or RLIMIT_NOFILE of this process, -1 for none.
std::int64_t soft_limit(int resource);

}  // namespace tessera::tools

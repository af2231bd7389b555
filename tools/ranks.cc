#include "tools/ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/nccl.h"
#include "comm/threads.h"
#include "engine/cuda.h"
#include "engine/error.h"

namespace tessera::tools {

using engine::DeviceError;
using engine::require;

namespace {

// GPUs to work on; 0: the CPU.
int count_gpus(DeviceChoice device) {
  if (device == DeviceChoice::kCpu) return 0;
  const bool required = device == DeviceChoice::kCuda;
  require<DeviceError>(engine::kCudaBuilt || !required,
                       "[device] expected a build with CUDA, got one without (device=cuda)");
  int num_gpus = 0;
  if constexpr (engine::kCudaBuilt) num_gpus = engine::cuda::num_devices();
  require<DeviceError>(num_gpus > 0 || !required,
                       "[device] expected a GPU with a driver for CUDA, got none (device=cuda)");
  return num_gpus;
}

}  // namespace

Ranks Ranks::choose(const TrainConfig& config) {
  const ParallelConfig& p = config.parallel;
  const int num_gpus = count_gpus(config.device);
  const int size = static_cast<int>(p.ranks > 0 ? p.ranks : num_gpus > 0 ? num_gpus : p.cpu_ranks);
  const bool one_each = num_gpus >= size;
  require(p.backend != BackendChoice::kNccl || one_each,
          "[config] expected a GPU for each of {} ranks, got {} (parallel.backend=nccl)", size,
          num_gpus);
  return {.size = size,
          .num_gpus = std::min(num_gpus, size),
          .nccl = p.backend == BackendChoice::kNccl ||
                  (p.backend == BackendChoice::kAuto && one_each && size > 1)};
}

engine::Stream Ranks::compute(int rank) const {
  return num_gpus == 0 ? engine::Stream::inline_cpu("compute")
                       : engine::Stream::cuda("compute", rank % num_gpus);
}

void Ranks::run(const TrainConfig& config,
                const std::function<void(comm::ProcessGroup&)>& fn) const {
  if constexpr (engine::kCudaBuilt) {
    if (nccl) {
      return comm::run_nccl_ranks(
          size, {.deadline = config.deadline(), .canonical = config.parallel.canonical}, fn);
    }
  }
  comm::run_ranks(size, {.deadline = config.deadline()}, fn);
}

std::string Ranks::str() const {
  const auto count = [](int n, const char* what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
  };
  return fmt::format("{}, {}{}, {}", num_gpus == 0 ? "cpu" : "cuda", count(size, "rank"),
                     num_gpus == 0 ? "" : " on " + count(num_gpus, "GPU"),
                     nccl ? "nccl" : "threads");
}

JsonRecord Ranks::record() const {
  return JsonRecord()
      .add("device", num_gpus == 0 ? "cpu" : "cuda")
      .add("ranks", size)
      .add("num_gpus", num_gpus)
      .add("backend", nccl ? "nccl" : "threads");
}

}  // namespace tessera::tools

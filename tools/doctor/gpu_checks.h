// The GPUs, their driver, and NCCL, as far as this build can use them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/doctor/check.h"

namespace tessera::tools {

struct Gpu {
  std::string name;
  std::int64_t memory_nbytes = 0;
  int major = 0, minor = 0;  ///< compute capability
};
struct GpuFacts {
  std::vector<Gpu> gpus;
  int driver_version = 0, runtime_version = 0;  ///< 12040 is CUDA 12.4; 0: unknown
};
/// Of a build with CUDA. Throws DeviceError naming the call of CUDA that failed.
GpuFacts cuda_facts();

/// `has_driver`: whether the kernel has NVIDIA's. `facts`: null for a build without CUDA.
Check check_gpus(const GpuFacts* facts, bool has_driver);
/// `version`: of NCCL, "2.22.3"; empty if there is none, for the reason `error`.
Check check_nccl(const std::string& version, const std::string& error, std::size_t num_gpus);

/// What check_gpus() and check_nccl() say of this machine.
struct Devices {
  Checks checks;
  std::size_t num_gpus = 0;  ///< that this build can use
  bool has_nccl = false;
};
Devices check_devices();

}  // namespace tessera::tools

// What CUDA says of the machine; only where it is built.
#include <cuda_runtime_api.h>

#include "engine/cuda.h"
#include "engine/cuda_check.h"
#include "tools/doctor/gpu_checks.h"

namespace tessera::tools {

GpuFacts cuda_facts() {
  GpuFacts facts;
  engine::check_cuda(cudaDriverGetVersion(&facts.driver_version), "cudaDriverGetVersion");
  engine::check_cuda(cudaRuntimeGetVersion(&facts.runtime_version), "cudaRuntimeGetVersion");
  for (int index = 0; index < engine::cuda::num_devices(); ++index) {
    cudaDeviceProp properties{};
    engine::check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    facts.gpus.push_back({.name = static_cast<const char*>(properties.name),
                          .memory_nbytes = static_cast<std::int64_t>(properties.totalGlobalMem),
                          .major = properties.major,
                          .minor = properties.minor});
  }
  return facts;
}

}  // namespace tessera::tools

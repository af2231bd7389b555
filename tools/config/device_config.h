// The options of what computes: --device, --cpu.* and --cuda.*.
#pragma once

#include <cstdint>
#include <string>

#include "tools/cli/flags.h"

namespace tessera::tools {

enum class DeviceChoice { kAuto, kCpu, kCuda };
/// Whether steps on a GPU are CUDA graphs; see graph_choice.h.
enum class GraphChoice { kAuto, kOn, kOff };

/// See engine/isa.h and engine/gemm/gemm.h.
struct CpuConfig {
  std::string isa = "auto";
  std::string gemm = "auto";
  std::int64_t threads_per_rank = 1;
  bool pin = false;

  void add_to(FlagSet& flags);
};

/// See gemm_choice.h and graph_choice.h.
struct CudaConfig {
  GraphChoice graph = GraphChoice::kAuto;
  bool tune_gemm = true;
  std::string gemm_algorithms;  ///< file; empty: gemm_algorithms.txt in the output folder

  void add_to(FlagSet& flags);
};

}  // namespace tessera::tools

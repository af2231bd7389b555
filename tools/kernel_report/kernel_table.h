// What CUDA kernels take of a GPU, as nvcc's ptxas says it, and as a page of docs/ that keeps it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// One kernel. Shared memory is what the compiler knows of: what a launch asks for comes on top.
struct KernelUse {
  std::string name;            ///< without tessera:: and arguments: "ops::scale_kernel<float>"
  std::string source;          ///< the .cu file
  std::int64_t registers = 0;  ///< of a thread
  std::int64_t stack_nbytes = 0, spill_store_nbytes = 0, spill_load_nbytes = 0;  // of a thread
  std::int64_t shared_nbytes = 0;                                                // of a block

  friend bool operator==(const KernelUse&, const KernelUse&) = default;
};

struct KernelTable {
  std::string compiler;            ///< "nvcc 13.0, sm_90"
  std::vector<KernelUse> kernels;  ///< by source, then by name
};

/// `text` is a file of kernel_reports() (third_party/cuda/defs.bzl). Throws InvalidArgument where
/// it is not, and where it holds no kernel.
KernelTable read_ptxas(std::string_view text);

/// The page: what the columns mean, and a row a kernel.
std::string kernel_page(const KernelTable& table);
/// The table of such a page. Throws InvalidArgument naming the line that is no row.
KernelTable read_kernel_page(std::string_view page);

/// What changed, a line each: kernels that are new, gone, or take more or less. Empty: nothing.
std::vector<std::string> changes(const KernelTable& before, const KernelTable& after);

}  // namespace tessera::tools

// Who multiplies matrices in this process: what was asked for and the machine has. Private to
// engine/gemm/gemm.cc and engine/cpu_choice.cc.
#pragma once

#include <memory>
#include <optional>

#include "engine/cpu_choice.h"
#include "engine/gemm/onednn.h"

namespace tessera::engine {

struct GemmChoice {
  std::optional<CpuGemm> asked;
  std::unique_ptr<const OneDnn> library;  ///< null means Eigen
  int num_threads;
  bool insists;  ///< on the library, however small the product
  /// Whether our own kernels take what suits them: see [Note: who multiplies].
  bool is_direct;
};

/// What is in force: that of `choice` if nothing was before. Throws InvalidArgument for what cannot
/// be honoured; then nothing is in force yet.
const GemmChoice& decide_gemm(const CpuChoice& choice);
/// What is in force: the defaults if nothing was before.
const GemmChoice& gemm_choice();

}  // namespace tessera::engine

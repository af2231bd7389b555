// Who multiplies matrices in this process: what the environment asks for and the machine has.
// Private to engine/gemm/gemm.cc.
#pragma once

#include <memory>

#include "engine/gemm/onednn.h"

namespace tessera::engine {

/// Whether f32 is multiplied in parts of bf16, and on which tiles: see [Note: three parts of an
/// f32].
enum class SplitF32 { kNo, kAmx, kPortable };

struct GemmChoice {
  std::unique_ptr<const OneDnn> library;  ///< null means Eigen
  int num_threads;
  bool insists;    ///< on the library, however small the product
  bool is_direct;  ///< where B is small: see [Note: products without packing]
  SplitF32 split;
};

/// Decided at the first call. Throws InvalidArgument for what cannot be honoured.
const GemmChoice& gemm_choice();

}  // namespace tessera::engine

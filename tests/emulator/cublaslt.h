// The emulated cublasLt, as tests see it. The C functions of <cublasLt.h> that the engine uses are
// defined by this library.
//
// Five algorithms, whose sums differ in order as those of real kernels do:
//   1  blocks of 32 along K; operands and result aligned to 16 bytes, leading dimensions as well
//   2  along K, one by one
//   3  K in halves, added in f32 from workspace (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
//   4  K in halves, added in the output (CUBLASLT_REDUCTION_SCHEME_INPLACE)
//   5  as 3, from parts of the output's type (CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)
// Proposed are 1, 3, 2, 5, 4; of a K much longer than the result is wide, 4, 5 and 3 first.
// With GELU (CUBLASLT_EPILOGUE_GELU_AUX_BIAS) an algorithm takes it of the f32 sum, as tanh; with
// its slope (CUBLASLT_EPILOGUE_DGELU) it multiplies the f32 sum with that at the auxiliary matrix.
// There are no gradients of biases (BGRAD). It is stricter than the library is known to be: bf16
// operands not aligned to 4 bytes have no algorithm, so that the fallback of callers runs.
// Workspace is overwritten by each product.
#pragma once

namespace tessera::cuda_emulation {

/// Handles and descriptors that exist now, in the whole process.
int live_cublaslt_objects();

/// Products of bf16 so far, in the whole process, of which an extent is no multiple of 8: a GPU's
/// tensor cores may not run them at full speed.
int num_odd_products();

}  // namespace tessera::cuda_emulation

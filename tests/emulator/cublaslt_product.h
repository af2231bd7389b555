// Products of the emulated cublasLt: what descriptors may say, the algorithms, and the arithmetic.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::cuda_emulation {

/// What a cublasLtMatmulDesc_t stands for.
struct Operation {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType_t scale_type = CUDA_R_32F;
  std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  std::int32_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;  ///< of GELU: takes its input; of its slope: where that is
  std::int64_t aux_ld = 0;

  bool has_gelu() const { return epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }
  bool has_slope() const { return epilogue == CUBLASLT_EPILOGUE_DGELU; }
  bool has_aux() const { return has_gelu() || has_slope(); }
  bool has_bias() const { return epilogue == CUBLASLT_EPILOGUE_BIAS || has_gelu(); }
};

/// What a cublasLtMatrixLayout_t stands for.
struct Layout {
  cudaDataType_t type = CUDA_R_32F;
  std::uint64_t rows = 0, cols = 0;
  std::int64_t ld = 0;

  std::int64_t element_nbytes() const { return type == CUDA_R_32F ? 4 : 2; }
  std::int64_t nbytes() const {
    return ((static_cast<std::int64_t>(cols) - 1) * ld + static_cast<std::int64_t>(rows)) *
           element_nbytes();
  }
  bool is_aligned(std::int64_t nbytes) const { return ld * element_nbytes() % nbytes == 0; }
};

struct ProductShape {
  std::int64_t m, n, k;
};

/// Column-major D (m, n) = alpha A (m, k) B (k, n) + beta C, A and B transposed if the operation
/// says so.
struct Product {
  Operation operation;
  Layout a, b, c, d;

  ProductShape shape() const;
  /// The library's answer to these descriptors.
  cublasStatus_t check() const;
};

/// What stands in a cublasLtMatmulAlgo_t. See cublaslt.h.
struct Algorithm {
  std::uint64_t library, id, unused[6];

  bool is_known() const;
  bool takes(const Product& product) const;
  std::int64_t alignment() const { return id == 1 ? 16 : 4; }  ///< of addresses, in bytes
  std::uint32_t reduction() const;
  std::size_t workspace_nbytes(const ProductShape& shape) const;
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));

/// A product with addresses of storage, as it runs on the stream.
struct Task {
  Product product;
  Algorithm algorithm;
  const void *a, *b, *c;
  void* d;
  const void* bias;
  void* aux;
  const float *device_alpha, *device_beta;  ///< null: the host's, next
  float alpha, beta;
  float* workspace;
  std::size_t workspace_nbytes;

  void run() const;

 private:
  template <class T>
  void store(const std::vector<float>& sums) const;
};

}  // namespace tessera::cuda_emulation

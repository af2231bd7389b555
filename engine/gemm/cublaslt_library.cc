// The functions of cublasLt that we call, each passed on to the library, which is loaded at the
// first call: half a gigabyte that runs on the CPU do without, and machines may lack.
#include <cublasLt.h>
#include <dlfcn.h>

#include "engine/error.h"

namespace {

void* library() {
  // By its version: the ABI that the headers of this build describe.
  static void* const handle =
      dlopen(CUBLAS_VER_MAJOR == 13 ? "libcublasLt.so.13" : "libcublasLt.so.12", RTLD_NOW);
  tessera::engine::require<tessera::engine::DeviceError>(
      handle != nullptr,
      "[cublaslt] expected to load cublasLt {}, which comes with the CUDA Toolkit, got {}",
      CUBLAS_VER_MAJOR, handle != nullptr ? "" : dlerror());
  return handle;
}

// The library's own function of the type of `declared`.
template <class F>
F* find(F* /*declared*/, const char* name) {
  auto* const function = reinterpret_cast<F*>(dlsym(library(), name));
  tessera::engine::require<tessera::engine::DeviceError>(
      function != nullptr, "[cublaslt] expected a function {} in the library, got none", name);
  return function;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  static auto* const call = find(&cublasLtCreate, "cublasLtCreate");
  return call(handle);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  static auto* const call = find(&cublasLtDestroy, "cublasLtDestroy");
  return call(handle);
}
const char* cublasLtGetStatusName(cublasStatus_t status) {
  static auto* const call = find(&cublasLtGetStatusName, "cublasLtGetStatusName");
  return call(status);
}
size_t cublasLtGetVersion() {
  static auto* const call = find(&cublasLtGetVersion, "cublasLtGetVersion");
  return call();
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_nbytes, cudaStream_t stream) {
  static auto* const call = find(&cublasLtMatmul, "cublasLtMatmul");
  return call(handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo,
              workspace, workspace_nbytes, stream);
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  static auto* const call = find(&cublasLtMatmulAlgoCheck, "cublasLtMatmulAlgoCheck");
  return call(handle, desc, a, b, c, d, algo, result);
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t nbytes, size_t* written) {
  static auto* const call =
      find(&cublasLtMatmulAlgoConfigGetAttribute, "cublasLtMatmulAlgoConfigGetAttribute");
  return call(algo, attribute, value, nbytes, written);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference,
                                              int num_requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* num_results) {
  static auto* const call = find(&cublasLtMatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  return call(handle, desc, a, b, c, d, preference, num_requested, results, num_results);
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  static auto* const call = find(&cublasLtMatmulDescCreate, "cublasLtMatmulDescCreate");
  return call(desc, compute, scale);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t nbytes) {
  static auto* const call = find(&cublasLtMatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  return call(desc, attribute, value, nbytes);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  static auto* const call = find(&cublasLtMatmulDescDestroy, "cublasLtMatmulDescDestroy");
  return call(desc);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  static auto* const call = find(&cublasLtMatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  return call(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t nbytes) {
  static auto* const call =
      find(&cublasLtMatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  return call(preference, attribute, value, nbytes);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  static auto* const call =
      find(&cublasLtMatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  return call(preference);
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  static auto* const call = find(&cublasLtMatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  return call(layout, type, rows, cols, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  static auto* const call = find(&cublasLtMatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  return call(layout);
}

}  // extern "C"

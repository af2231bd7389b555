#include "tests/emulator/cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <variant>

#include "tests/emulator/cublaslt_product.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

struct Handle {
  int device = 0;
};
struct Preference {
  std::uint64_t workspace_nbytes = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

// Everything that a caller holds a handle of.
struct Registry {
  using Object = std::variant<Handle, Operation, Layout, Preference>;
  std::mutex mutex;
  std::unordered_map<const void*, std::unique_ptr<Object>> objects;
};
Registry& registry() {
  static Registry registry;
  return registry;
}

template <class Opaque, class T>
cublasStatus_t create(Opaque** handle, T value) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  auto object = std::make_unique<Registry::Object>(std::move(value));
  *handle = reinterpret_cast<Opaque*>(object.get());
  const std::lock_guard lock(registry().mutex);
  registry().objects.emplace(*handle, std::move(object));
  return CUBLAS_STATUS_SUCCESS;
}

// Null for what is no live handle of this kind.
template <class T>
T* get(const void* handle) {
  const std::lock_guard lock(registry().mutex);
  const auto object = registry().objects.find(handle);
  return object == registry().objects.end() ? nullptr : std::get_if<T>(object->second.get());
}

template <class T>
cublasStatus_t destroy(const void* handle) {
  if (get<T>(handle) == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  const std::lock_guard lock(registry().mutex);
  registry().objects.erase(handle);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t assign(T& field, const void* value, std::size_t nbytes) {
  if (value == nullptr || nbytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, nbytes);
  return CUBLAS_STATUS_SUCCESS;
}

std::atomic<int> num_odd{0};

bool is_odd(const Product& product) {
  const ProductShape s = product.shape();
  return product.a.type == CUDA_R_16BF && (s.m % 8 != 0 || s.n % 8 != 0 || s.k % 8 != 0);
}

bool is_aligned(const void* address, std::int64_t nbytes) {
  return reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(nbytes) == 0;
}

bool in_memory(const void* address, std::int64_t nbytes) {
  return is_device_memory(address, static_cast<std::size_t>(nbytes));
}

}  // namespace

int live_cublaslt_objects() {
  const std::lock_guard lock(registry().mutex);
  return static_cast<int>(registry().objects.size());
}

int num_odd_products() { return num_odd.load(); }

}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the C functions are at file scope

extern "C" {

std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
      return "another cublasStatus_t";
  }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  Handle value;
  if (cudaGetDevice(&value.device) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  return create(handle, value);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy<Handle>(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale_type) {
  return create(desc, Operation{.compute = compute, .scale_type = scale_type});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  return destroy<Operation>(desc);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t nbytes) {
  Operation* operation = get<Operation>(desc);
  if (operation == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return assign(operation->pointer_mode, value, nbytes);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return assign(operation->transa, value, nbytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return assign(operation->transb, value, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return assign(operation->epilogue, value, nbytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return assign(operation->bias, value, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return assign(operation->aux, value, nbytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return assign(operation->aux_ld, value, nbytes);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
  return create(layout, Layout{.type = type, .rows = rows, .cols = cols, .ld = ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy<Layout>(layout);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return create(preference, Preference());
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t nbytes) {
  Preference* preference = get<Preference>(handle);
  if (preference == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return assign(preference->workspace_nbytes, value, nbytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return assign(preference->reductions, value, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return assign(preference->alignment[0], value, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return assign(preference->alignment[1], value, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return assign(preference->alignment[2], value, nbytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return assign(preference->alignment[3], value, nbytes);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  const Operation* operation = get<Operation>(desc);
  const Layout *la = get<Layout>(a), *lb = get<Layout>(b), *lc = get<Layout>(c),
               *ld = get<Layout>(d);
  if (get<Handle>(handle) == nullptr || operation == nullptr || la == nullptr || lb == nullptr ||
      lc == nullptr || ld == nullptr || algo == nullptr || result == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  const Product product{*operation, *la, *lb, *lc, *ld};
  if (const cublasStatus_t status = product.check(); status != CUBLAS_STATUS_SUCCESS) return status;
  const auto algorithm = std::bit_cast<Algorithm>(*algo);
  if (!algorithm.is_known()) return CUBLAS_STATUS_INVALID_VALUE;
  if (!algorithm.takes(product)) return CUBLAS_STATUS_NOT_SUPPORTED;
  *result = {};
  result->algo = *algo;
  result->workspaceSize = algorithm.workspace_nbytes(product.shape());
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, std::size_t nbytes,
                                                    std::size_t* written) {
  if (algo == nullptr || value == nullptr || written == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  const auto algorithm = std::bit_cast<Algorithm>(*algo);
  auto asked = static_cast<std::uint32_t>(algorithm.id);
  if (attribute == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)
    asked = algorithm.reduction();
  else if (attribute != CUBLASLT_ALGO_CONFIG_ID)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (nbytes != sizeof asked) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, &asked, sizeof asked);
  *written = sizeof asked;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference_handle,
                                              int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  const Preference* preference = get<Preference>(preference_handle);
  if (preference == nullptr || requested < 1 || results == nullptr || count == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  *count = 0;
  const auto& alignment = preference->alignment;
  const Operation* operation = get<Operation>(desc);
  const Layout *la = get<Layout>(a), *lb = get<Layout>(b);
  if (operation == nullptr || la == nullptr || lb == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  const ProductShape shape = Product{*operation, *la, *lb, {}, {}}.shape();
  const bool is_long = shape.k >= 32 * std::max(shape.m, shape.n);
  using Ids = std::array<std::uint64_t, 5>;
  for (const std::uint64_t id : is_long ? Ids{4, 5, 3, 1, 2} : Ids{1, 3, 2, 5, 4}) {
    const Algorithm algorithm{cublasLtGetVersion(), id, {}};
    const auto algo = std::bit_cast<cublasLtMatmulAlgo_t>(algorithm);
    cublasLtMatmulHeuristicResult_t result;
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, desc, a, b, c, d, &algo, &result);
    if (status == CUBLAS_STATUS_INVALID_VALUE) return status;
    const bool fits = status == CUBLAS_STATUS_SUCCESS &&
                      result.workspaceSize <= preference->workspace_nbytes &&
                      (algorithm.reduction() & ~preference->reductions) == 0 &&
                      *std::min_element(alignment, alignment + 4) >= algorithm.alignment();
    if (fits && *count < requested) results[(*count)++] = result;
  }
  return *count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, std::size_t workspace_nbytes, cudaStream_t stream) {
  cublasLtMatmulHeuristicResult_t result;
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(handle, desc, a_layout, b_layout, c_layout, d_layout, algo, &result);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const Product product{*get<Operation>(desc), *get<Layout>(a_layout), *get<Layout>(b_layout),
                        *get<Layout>(c_layout), *get<Layout>(d_layout)};
  const Operation& operation = product.operation;
  const auto algorithm = std::bit_cast<Algorithm>(*algo);
  const bool has_bias = operation.has_bias(), has_aux = operation.has_aux();
  const bool on_host = operation.pointer_mode == CUBLASLT_POINTER_MODE_HOST;
  bool fits = alpha != nullptr && beta != nullptr && product.c.ld == product.d.ld &&
              (!has_bias || operation.bias != nullptr) &&
              (!has_aux || (operation.aux != nullptr && is_aligned(operation.aux, 16))) &&
              workspace_nbytes >= result.workspaceSize && is_aligned(workspace, 16) &&
              device_of(stream) == get<Handle>(handle)->device;
  for (const void* address : {a, b, c, static_cast<const void*>(d)})
    fits = fits && is_aligned(address, algorithm.alignment());
  if (!fits) return CUBLAS_STATUS_INVALID_VALUE;
  if (is_odd(product)) ++num_odd;

  // The library does not look at memory: a kernel that leaves it ends the device.
  const std::int64_t bias_nbytes = product.shape().m * product.d.element_nbytes();
  const std::int64_t aux_nbytes =
      ((product.shape().n - 1) * operation.aux_ld + product.shape().m) * product.d.element_nbytes();
  const bool reachable =
      in_memory(a, product.a.nbytes()) && in_memory(b, product.b.nbytes()) &&
      in_memory(c, product.c.nbytes()) && in_memory(d, product.d.nbytes()) &&
      (workspace_nbytes == 0 || is_device_memory(workspace, workspace_nbytes)) &&
      (!has_bias || (in_memory(operation.bias, bias_nbytes) && is_aligned(operation.bias, 16))) &&
      (!has_aux || in_memory(operation.aux, aux_nbytes)) &&
      (on_host || (in_memory(alpha, sizeof(float)) && in_memory(beta, sizeof(float))));
  const Task task{.product = product,
                  .algorithm = algorithm,
                  .a = storage_of(a),
                  .b = storage_of(b),
                  .c = storage_of(c),
                  .d = storage_of(d),
                  .bias = has_bias ? storage_of(operation.bias) : nullptr,
                  .aux = has_aux ? storage_of(operation.aux) : nullptr,
                  .device_alpha = on_host ? nullptr : static_cast<const float*>(storage_of(alpha)),
                  .device_beta = on_host ? nullptr : static_cast<const float*>(storage_of(beta)),
                  .alpha = on_host ? *static_cast<const float*>(alpha) : 0,
                  .beta = on_host ? *static_cast<const float*>(beta) : 0,
                  .workspace = static_cast<float*>(storage_of(workspace)),
                  .workspace_nbytes = workspace_nbytes};
  const cudaError_t error = enqueue(stream, "cublasLtMatmul", [task, reachable] {
    if (!reachable) throw std::runtime_error("an operand is not device memory, or is misaligned");
    task.run();
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"

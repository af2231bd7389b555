#include "tests/emulator/cublaslt_product.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/emulator/bfloat16.h"

namespace tessera::cuda_emulation {

namespace {

// (rows, cols) row-major in f32 of a column-major matrix, transposed first if asked.
std::vector<float> widen(const Layout& layout, bool transposed, const void* data) {
  const auto stored_rows = static_cast<std::int64_t>(layout.rows);
  const auto stored_cols = static_cast<std::int64_t>(layout.cols);
  const std::int64_t rows = transposed ? stored_cols : stored_rows;
  const std::int64_t cols = transposed ? stored_rows : stored_cols;
  std::vector<float> wide(static_cast<std::size_t>(rows * cols));
  const auto copy = [&](const auto* src) {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        wide[static_cast<std::size_t>(i * cols + j)] =
            to_f32(src[transposed ? i * layout.ld + j : j * layout.ld + i]);
  };
  if (layout.type == CUDA_R_32F)
    copy(static_cast<const float*>(data));
  else
    copy(static_cast<const BFloat16*>(data));
  return wide;
}

float tanh_gelu(float x) {
  return 0.5f * x * (1 + std::tanh(0.797884561f * (x + 0.044715f * x * x * x)));
}

float tanh_gelu_slope(float x) {
  const float t = std::tanh(0.797884561f * (x + 0.044715f * x * x * x));
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.797884561f * (1 + 3 * 0.044715f * x * x);
}

// sums (m, n) += the part of the product over [begin, end) of K.
void add_part(float* sums, const float* a, const float* b, const ProductShape& s,
              std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = 0; i < s.m; ++i)
    for (std::int64_t k = begin; k < end; ++k) {
      const float x = a[i * s.k + k];
      for (std::int64_t j = 0; j < s.n; ++j) sums[i * s.n + j] += x * b[k * s.n + j];
    }
}

}  // namespace

ProductShape Product::shape() const {
  const bool ta = operation.transa == CUBLAS_OP_T, tb = operation.transb == CUBLAS_OP_T;
  return {static_cast<std::int64_t>(ta ? a.cols : a.rows),
          static_cast<std::int64_t>(tb ? b.rows : b.cols),
          static_cast<std::int64_t>(ta ? a.rows : a.cols)};
}

cublasStatus_t Product::check() const {
  for (const Layout& l : {a, b, c, d}) {
    if (l.rows == 0 || l.cols == 0 || l.ld < static_cast<std::int64_t>(l.rows))
      return CUBLAS_STATUS_INVALID_VALUE;
  }
  const ProductShape s = shape();
  const auto m = static_cast<std::uint64_t>(s.m), n = static_cast<std::uint64_t>(s.n);
  const std::uint64_t b_rows = operation.transb == CUBLAS_OP_T ? b.cols : b.rows;
  if (b_rows != static_cast<std::uint64_t>(s.k) || c.rows != m || c.cols != n || d.rows != m ||
      d.cols != n)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (operation.has_aux() && (operation.aux_ld % 8 != 0 || operation.aux_ld < s.m))
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool types = (a.type == CUDA_R_32F && d.type == CUDA_R_32F) ||
                     (a.type == CUDA_R_16BF && (d.type == CUDA_R_32F || d.type == CUDA_R_16BF));
  const bool known = types && b.type == a.type && c.type == d.type &&
                     operation.compute == CUBLAS_COMPUTE_32F &&
                     operation.scale_type == CUDA_R_32F &&
                     (operation.epilogue == CUBLASLT_EPILOGUE_DEFAULT || operation.has_bias() ||
                      operation.has_slope()) &&
                     (operation.pointer_mode == CUBLASLT_POINTER_MODE_HOST ||
                      operation.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) &&
                     a.is_aligned(4) && b.is_aligned(4);
  return known ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

bool Algorithm::is_known() const { return library == cublasLtGetVersion() && id >= 1 && id <= 5; }

bool Algorithm::takes(const Product& p) const {
  return id != 1 || (p.a.is_aligned(16) && p.b.is_aligned(16) && p.d.is_aligned(16));
}

std::uint32_t Algorithm::reduction() const {
  if (id == 3) return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (id == 5) return CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  return id == 4 ? CUBLASLT_REDUCTION_SCHEME_INPLACE : CUBLASLT_REDUCTION_SCHEME_NONE;
}

std::size_t Algorithm::workspace_nbytes(const ProductShape& s) const {
  if (id == 3 || id == 5) return static_cast<std::size_t>(2 * s.m * s.n) * sizeof(float);
  return id == 4 ? 1024 : 0;
}

void Task::run() const {
  const ProductShape s = product.shape();
  const auto wide_a = widen(product.a, product.operation.transa == CUBLAS_OP_T, a);
  const auto wide_b = widen(product.b, product.operation.transb == CUBLAS_OP_T, b);
  const auto add = [&](float* sums, std::int64_t begin, std::int64_t end) {
    add_part(sums, wide_a.data(), wide_b.data(), s, begin, end);
  };
  const auto numel = static_cast<std::size_t>(s.m * s.n);
  std::vector<float> sums(numel, 0.0f);
  if (algorithm.id == 1) {
    std::vector<float> part(numel);
    for (std::int64_t k = 0; k < s.k; k += 32) {
      std::fill(part.begin(), part.end(), 0.0f);
      add(part.data(), k, std::min(k + 32, s.k));
      for (std::size_t i = 0; i < numel; ++i) sums[i] += part[i];
    }
  } else if (algorithm.id == 2) {
    add(sums.data(), 0, s.k);
  } else if (algorithm.id == 3 || algorithm.id == 5) {
    std::fill(workspace, workspace + 2 * numel, 0.0f);
    add(workspace, 0, s.k / 2);
    add(workspace + numel, s.k / 2, s.k);
    if (algorithm.id == 5 && product.d.type == CUDA_R_16BF)
      for (std::size_t i = 0; i < 2 * numel; ++i) workspace[i] = round_to_bf16(workspace[i]);
    for (std::size_t i = 0; i < numel; ++i) sums[i] = workspace[i] + workspace[numel + i];
  } else {
    add(sums.data(), 0, s.k / 2);
    if (product.d.type == CUDA_R_16BF)
      for (float& sum : sums) sum = round_to_bf16(sum);
    add(sums.data(), s.k / 2, s.k);
  }
  if (workspace_nbytes > 0) std::memset(workspace, 0xFF, workspace_nbytes);
  if (product.d.type == CUDA_R_32F)
    store<float>(sums);
  else
    store<BFloat16>(sums);
}

template <class T>
void Task::store(const std::vector<float>& sums) const {
  const ProductShape s = product.shape();
  const float scale = device_alpha != nullptr ? *device_alpha : alpha;
  const float old_scale = device_beta != nullptr ? *device_beta : beta;
  for (std::int64_t j = 0; j < s.n; ++j)
    for (std::int64_t i = 0; i < s.m; ++i) {
      const std::int64_t at = j * product.d.ld + i;
      float value = scale * sums[static_cast<std::size_t>(i * s.n + j)];
      if (old_scale != 0) value += old_scale * to_f32(static_cast<const T*>(c)[at]);
      if (bias != nullptr) value += to_f32(static_cast<const T*>(bias)[i]);
      if (aux != nullptr) {
        T& before = static_cast<T*>(aux)[j * product.operation.aux_ld + i];
        if (product.operation.has_slope()) {
          value *= tanh_gelu_slope(to_f32(before));
        } else {
          store_f32(before, value);
          value = tanh_gelu(value);
        }
      }
      store_f32(static_cast<T*>(d)[at], value);
    }
}

}  // namespace tessera::cuda_emulation

// The emulated cublasLt refuses what the library refuses, and the engine's products run on it as
// they would on the library: asynchronous, without blocking calls, nothing left behind.
#include "tests/emulator/cublaslt.h"

#include <cublasLt.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "engine/copy.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/gemm/gemm_cuda.h"
#include "tests/emulator/control.h"
#include "tests/ops/naive_cross_entropy.h"

namespace tessera::cuda_emulation {
namespace {

using engine::DType;
using engine::GemmAlgorithms;
using engine::Memory;
using engine::Stream;
using engine::Tensor;
using testing::linear_case;
using testing::run_op;
using testing::some_targets;
using testing::Targets;

// Descriptors of D (m, n) = A (m, k) B (k, n), all column-major and packed.
struct Descriptors {
  Descriptors(std::uint64_t m, std::uint64_t n, std::uint64_t k, cudaDataType_t in,
              cudaDataType_t out) {
    EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
    cublasLtMatrixLayoutCreate(&a, in, m, k, static_cast<std::int64_t>(m));
    cublasLtMatrixLayoutCreate(&b, in, k, n, static_cast<std::int64_t>(k));
    cublasLtMatrixLayoutCreate(&d, out, m, n, static_cast<std::int64_t>(m));
  }
  ~Descriptors() {
    for (const auto layout : {a, b, d}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(operation);
    cublasLtDestroy(handle);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  template <class T>
  void prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
              CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t propose() {
    return cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, d, d, preference, 8, results,
                                          &count);
  }
  cublasStatus_t multiply(const void* at, void* to, cudaStream_t stream,
                          std::size_t workspace_nbytes = 0, void* workspace = nullptr) {
    const float alpha = 1, beta = 0;
    return cublasLtMatmul(handle, operation, &alpha, at, a, at, b, &beta, to, d, to, d,
                          &results[0].algo, workspace, workspace_nbytes, stream);
  }

  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulHeuristicResult_t results[8];
  int count = 0;
};

TEST(CublasLtTest, ProposesWhatThePreferenceAllows) {
  Descriptors f32(8, 8, 8, CUDA_R_32F, CUDA_R_32F);
  EXPECT_EQ(f32.propose(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(f32.count, 2) << "those without workspace";
  f32.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{4096});
  EXPECT_EQ(f32.propose(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(f32.count, 5);
  f32.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
             std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  EXPECT_EQ(f32.propose(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(f32.count, 3);
  f32.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
             std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
                           CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE});
  EXPECT_EQ(f32.propose(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(f32.count, 4);
  f32.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{4});
  EXPECT_EQ(f32.propose(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(f32.count, 3);
  Descriptors odd(7, 8, 8, CUDA_R_16BF, CUDA_R_16BF);
  EXPECT_EQ(odd.propose(), CUBLAS_STATUS_NOT_SUPPORTED);
  Descriptors mixed(8, 8, 8, CUDA_R_32F, CUDA_R_16BF);
  EXPECT_EQ(mixed.propose(), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST(CublasLtTest, RefusesWhatDoesNotFit) {
  const Stream stream = Stream::cuda("compute", 0);
  const Memory memory(stream);
  const Tensor x = Tensor::zeros(memory, {16, 16}, DType::kF32);
  auto* native = static_cast<cudaStream_t>(stream.native());
  Descriptors p(16, 16, 16, CUDA_R_32F, CUDA_R_32F);
  EXPECT_EQ(cublasLtDestroy(reinterpret_cast<cublasLtHandle_t>(p.operation)),
            CUBLAS_STATUS_INVALID_VALUE);
  p.results[0] = {};
  EXPECT_EQ(p.multiply(x.raw(), x.raw(), native), CUBLAS_STATUS_INVALID_VALUE) << "no algorithm";
  EXPECT_EQ(p.propose(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(p.multiply(x.raw() + 4, x.raw(), native), CUBLAS_STATUS_INVALID_VALUE) << "alignment";
  p.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{4096});
  EXPECT_EQ(p.propose(), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(p.results[1].workspaceSize, 2048u);
  std::swap(p.results[0], p.results[1]);
  EXPECT_EQ(p.multiply(x.raw(), x.raw(), native), CUBLAS_STATUS_INVALID_VALUE) << "workspace";
  const std::uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                 sizeof epilogue);
  EXPECT_EQ(p.multiply(x.raw(), x.raw(), native, 2048, x.raw()), CUBLAS_STATUS_INVALID_VALUE)
      << "no bias";
  cublasLtMatrixLayout_t narrow = nullptr;
  cublasLtMatrixLayoutCreate(&narrow, CUDA_R_32F, 16, 16, 15);
  std::swap(p.a, narrow);
  EXPECT_EQ(p.propose(), CUBLAS_STATUS_INVALID_VALUE) << "leading dimension";
  cublasLtMatrixLayoutDestroy(narrow);
}

TEST(CublasLtTest, RefusesGeluThatDoesNotFit) {
  const Stream stream = Stream::cuda("compute", 0);
  const Memory memory(stream);
  const Tensor x = Tensor::zeros(memory, {16, 16}, DType::kBF16);
  auto* native = static_cast<cudaStream_t>(stream.native());
  for (const auto epilogue : {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU}) {
    Descriptors p(16, 16, 16, CUDA_R_16BF, CUDA_R_16BF);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      EXPECT_EQ(cublasLtMatmulDescSetAttribute(p.operation, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    };
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{epilogue});
    if (epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(x.raw()));
    EXPECT_EQ(p.propose(), CUBLAS_STATUS_INVALID_VALUE) << "no leading dimension";
    for (const std::int64_t ld : {8, 20}) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
      EXPECT_EQ(p.propose(), CUBLAS_STATUS_INVALID_VALUE) << ld;
    }
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{16});
    EXPECT_EQ(p.propose(), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(p.multiply(x.raw(), x.raw(), native), CUBLAS_STATUS_INVALID_VALUE) << "no memory";
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(x.raw() + 8));
    EXPECT_EQ(p.multiply(x.raw(), x.raw(), native), CUBLAS_STATUS_INVALID_VALUE) << "alignment";
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(x.raw()));
    EXPECT_EQ(p.multiply(x.raw(), x.raw(), native), CUBLAS_STATUS_SUCCESS);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_DGELU_BGRAD});
    EXPECT_EQ(p.propose(), CUBLAS_STATUS_NOT_SUPPORTED) << "nobody asks for it";
  }
  stream.synchronize();
}

TEST(CublasLtTest, LeavingMemoryEndsTheDevice) {
  {
    const Stream stream = Stream::cuda("compute", 0);
    std::vector<float> host(256);
    Descriptors p(16, 16, 16, CUDA_R_32F, CUDA_R_32F);
    p.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{4});
    ASSERT_EQ(p.propose(), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(p.multiply(host.data(), host.data(), static_cast<cudaStream_t>(stream.native())),
              CUBLAS_STATUS_SUCCESS);
    EXPECT_THROW(stream.synchronize(), engine::DeviceError);
  }
  reset();
}

// C (m, n) of a product with one row of A, of values that cancel: its bits tell orders apart.
float multiply(const Stream& stream, const Memory& memory) {
  constexpr std::int64_t kDepth = 64;
  std::vector<float> values(kDepth * 8), ones(kDepth * 8, 1.0f);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1.0f / static_cast<float>(3 + i);
  const Tensor a = Tensor::from<float>(memory, {8, kDepth}, values);
  const Tensor b = Tensor::from<float>(memory, {kDepth, 8}, ones);
  const Tensor c = Tensor::empty(memory, {8, 8}, DType::kF32);
  start_counting();
  stream.launch(
      {.name = "gemm"}, [] {},
      [&](const auto& cuda_stream) {
        engine::gemm_cuda(cuda_stream, memory,
                          {.a = engine::device_matrix(a, 8, kDepth),
                           .b = engine::device_matrix(b, kDepth, 8),
                           .c = engine::device_matrix(c, 8, 8)});
      });
  EXPECT_EQ(calls().launches, 1);
  EXPECT_EQ(calls().blocking, 0);
  return engine::to_vector<float>(c)[0];
}

TEST(CublasLtTest, ProductsTakeTheAlgorithmOfTheFile) {
  const std::string key = fmt::format(
      "tessera gemm algorithms 1\ncublasLt {} | Emulated sm_90 | (8, 64) (64, 8) | f32 ld 64 align "
      "16 | f32 ld 8 align 16 | f32 ld 8 align 16\t{:08x} 00000000 0000000",
      cublasLtGetVersion(), cublasLtGetVersion());
  const auto run = [&](const std::string& id) {
    const Stream stream = Stream::cuda("compute", 0);
    const Memory memory(stream);
    const auto algorithms = std::make_shared<GemmAlgorithms>();
    std::string rest;
    for (int i = 0; i < 13; ++i) rest += " 00000000";
    algorithms->load(key + id + rest, "gemm.txt");
    engine::set_gemm_algorithms(stream, algorithms);
    return multiply(stream, memory);
  };
  const Stream stream = Stream::cuda("compute", 0);
  const Memory memory(stream);
  EXPECT_EQ(run("1"), multiply(stream, memory)) << "the first proposed";
  EXPECT_NE(run("2"), run("1"));
  EXPECT_NE(run("3"), run("2"));
  EXPECT_THROW(run("9"), engine::IoError);
}

// Small whole numbers and a half, so that no sum is rounded. GELU (tanh) of 1.
TEST(CublasLtTest, GeluIsTheProductsWhereTheFileHasAnAlgorithm) {
  const std::string of_product = fmt::format(
      "cublasLt {} | Emulated sm_90 | (8, 16) (16, 24) | bf16 ld 16 align 16 | bf16 ld 24 align 16 "
      "| bf16 ld 24 align 16 | bias | gelu",
      cublasLtGetVersion());
  const engine::DeviceFunction copy = [](const Stream& on, DType, void* y, const void* x,
                                         std::int64_t numel) {
    EXPECT_EQ(numel, 8 * 24);
    EXPECT_EQ(cudaMemcpyAsync(y, x, static_cast<std::size_t>(numel) * 2, cudaMemcpyDeviceToDevice,
                              static_cast<cudaStream_t>(on.native())),
              cudaSuccess);
  };
  // The first elements before and after.
  const auto run = [&](std::optional<std::uint32_t> id) {
    const Stream stream = Stream::cuda("compute", 0);
    const Memory memory(stream);
    const auto algorithms = std::make_shared<GemmAlgorithms>();
    if (id) {
      GemmAlgorithms::Algorithm words{};
      if (*id > 0) words[0] = static_cast<std::uint32_t>(cublasLtGetVersion()), words[2] = *id;
      algorithms->insert(of_product, words);
    }
    engine::set_gemm_algorithms(stream, algorithms);
    const auto filled = [&](engine::Shape shape, float value) {
      return testing::to_tensor(memory, shape,
                                std::vector<float>(static_cast<std::size_t>(shape.numel()), value),
                                DType::kBF16);
    };
    const Tensor a = filled({8, 16}, 0.25f), b = filled({16, 24}, 0.125f),
                 bias = filled({24}, 0.5f);
    const Tensor before = filled({8, 24}, NAN), behind = filled({8, 24}, NAN);
    stream.launch(
        {.name = "gemm"}, [] {},
        [&](const auto& cuda_stream) {
          engine::gemm_cuda(cuda_stream, memory,
                            {.a = engine::device_matrix(a, 8, 16),
                             .b = engine::device_matrix(b, 16, 24),
                             .c = engine::device_matrix(behind, 8, 24),
                             .bias = bias.raw(),
                             .before_gelu = engine::device_matrix(before, 8, 24),
                             .gelu = copy});
        });
    return std::pair(testing::to_values(before), testing::to_values(behind));
  };
  const std::vector<double> one(8 * 24, 1.0), gelu_of_one(8 * 24, 0.83984375);
  EXPECT_EQ(run(std::nullopt), std::pair(one, one)) << "the function given, here a copy";
  EXPECT_EQ(run(0), std::pair(one, one)) << "faster apart";
  for (const std::uint32_t id : {1, 2, 3}) EXPECT_EQ(run(id), std::pair(one, gelu_of_one)) << id;
  EXPECT_THROW(run(9), engine::IoError);
}

// Parts of f32 may lie in workspace as what the result is; of bf16 they would be rounded each.
TEST(CublasLtTest, LongSumsAreSplit) {
  constexpr std::int64_t kWide = 8, kDepth = 32 * kWide;
  std::vector<float> values(kDepth * kWide, 1.0f);
  std::fill(values.begin() + kDepth * kWide / 2, values.end(), -1.0f);
  std::fill(values.end() - kWide, values.end(), -1 + 0x1p-6f);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Stream stream = Stream::cuda("compute", 0);
    Memory memory(stream);
    const Tensor a = testing::to_tensor(memory, {kDepth, kWide}, values, DType::kBF16);
    const Tensor ones = testing::to_tensor(memory, {kDepth, kWide},
                                           std::vector<float>(kDepth * kWide, 1.0f), DType::kBF16);
    const Tensor c = Tensor::empty(memory, {kWide, kWide}, dtype);
    memory.reset_peaks();
    stream.launch(
        {.name = "gemm"}, [] {},
        [&](const auto& cuda_stream) {
          engine::gemm_cuda(cuda_stream, memory,
                            {.a = engine::device_matrix(a, kDepth, kWide).t(),
                             .b = engine::device_matrix(ones, kDepth, kWide),
                             .c = engine::device_matrix(c, kWide, kWide)});
        });
    EXPECT_EQ(memory.stats().peak_nbytes[static_cast<int>(engine::Category::kWorkspace)],
              2 * kWide * kWide * 4);
    EXPECT_EQ(testing::to_values(c)[0], 0x1p-6) << "0 if the halves are rounded to bf16";
  }
}

// Of odd products in a forward and a backward.
int count_odd_products(std::int64_t rows, std::int64_t vocab_size) {
  const int before = num_odd_products();
  const Targets targets = some_targets(rows, vocab_size);
  for (const std::int64_t max_saved_numel : {-1, 0})
    run_op(linear_case(targets, vocab_size, 8, {.max_saved_numel = max_saved_numel}),
           {.dtype = DType::kBF16, .grad_dtype = DType::kF32, .on_cuda = true});
  return num_odd_products() - before;
}

TEST(CublasLtTest, VocabularyOfOddSizeMakesNoOddProducts) {
  EXPECT_EQ(count_odd_products(16, 77), 0);
  EXPECT_EQ(count_odd_products(16, 4099), 0);
  EXPECT_EQ(count_odd_products(17, 77), 6) << "the number of tokens is what it is";
}

TEST(CublasLtTest, NothingIsLeft) {
  {
    const Stream stream = Stream::cuda("compute", 1);
    const Memory memory(stream);
    multiply(stream, memory);
    EXPECT_GT(live_cublaslt_objects(), 4);
  }
  EXPECT_EQ(live_cublaslt_objects(), 0);
}

}  // namespace
}  // namespace tessera::cuda_emulation

#include "engine/gemm/cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/cuda_check.h"
#include "engine/gemm/gemm_algorithms.h"

namespace tessera::engine {

namespace {

// What an algorithm may ask for; those that ask for less get less. Kernels alone are content with
// 32 MiB on sm_90, the parts of a split K are not: those of the narrow gradients of weights, whose
// few tiles would leave most of a GPU idle, take 50 MB for (768, 2304) in 7 parts.
constexpr std::uint64_t kMaxWorkspace = std::uint64_t{128} << 20;
constexpr int kMaxCandidates = 16;
// The largest alignment that a kernel needs. Telling cublasLt of more would make the choice, and so
// the bits, depend on where an allocation happens to be.
constexpr std::uint32_t kAlignment = 16;
// The entry of a product with GELU, or its slope, that is faster without. No algorithm: cublasLt
// refuses it.
constexpr GemmAlgorithms::Algorithm kApart = {};

void check(cublasStatus_t status, std::string_view call) {
  require<DeviceError>(status == CUBLAS_STATUS_SUCCESS, "[cublaslt] expected {} to succeed, got {}",
                       call, cublasLtGetStatusName(status));
}

template <auto kDestroy>
struct Destroyer {
  template <class T>
  void operator()(T* handle) const {
    (void)kDestroy(handle);
  }
};
template <class Handle, auto kDestroy>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<kDestroy>>;
using Handle = Owner<cublasLtHandle_t, cublasLtDestroy>;
using Operation = Owner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <class T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute");
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

std::uint32_t alignment_of(const void* address) {
  const auto bits = std::bit_cast<std::uintptr_t>(address) | kAlignment;
  return std::uint32_t{1} << std::countr_zero(bits);
}

cudaDataType_t type_of(DType dtype) { return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

// One matrix of a product, as far as it reaches the choice of an algorithm.
struct Side {
  explicit Side(const DeviceMatrix& m)
      : dtype(m.dtype),
        rows(m.rows),
        cols(m.cols),
        ld(m.ld),
        transposed(m.transposed),
        alignment(alignment_of(m.data)) {}

  // A row-major matrix is a column-major one of the transpose.
  Layout layout() const {
    cublasLtMatrixLayout_t layout = nullptr;
    check(cublasLtMatrixLayoutCreate(&layout, type_of(dtype),
                                     static_cast<std::uint64_t>(transposed ? rows : cols),
                                     static_cast<std::uint64_t>(transposed ? cols : rows), ld),
          "cublasLtMatrixLayoutCreate");
    return Layout(layout);
  }
  cublasOperation_t operation() const { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }
  std::string text() const {
    return fmt::format("{}{} ld {} align {}", name_of(dtype), transposed ? "^T" : "", ld,
                       alignment);
  }
  bool operator==(const Side&) const = default;

  DType dtype;
  std::int64_t rows, cols, ld;
  bool transposed;
  std::uint32_t alignment;
};

// What an algorithm says of itself, as far as it does.
std::string text_of(const cublasLtMatmulAlgo_t& algorithm) {
  constexpr std::pair<cublasLtMatmulAlgoConfigAttributes_t, const char*> kParts[] = {
      {CUBLASLT_ALGO_CONFIG_ID, "id"},
      {CUBLASLT_ALGO_CONFIG_TILE_ID, "tile"},
      {CUBLASLT_ALGO_CONFIG_STAGES_ID, "stages"},
      {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, "split"},
      {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, "reduction"}};
  std::string text;
  for (const auto& [attribute, name] : kParts) {
    std::uint32_t value = 0;
    std::size_t written = 0;
    if (cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value,
                                             &written) != CUBLAS_STATUS_SUCCESS) {
      continue;
    }
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, value);
  }
  return text;
}

// What record_gemms() keeps of a matrix.
DeviceMatrix recorded(const DeviceMatrix& m) {
  DeviceMatrix r = m;
  r.data = std::bit_cast<void*>(std::uintptr_t{alignment_of(m.data)});
  return r;
}

// Memory for a recorded matrix, as aligned as it was, full of small numbers.
class Scratch {
 public:
  Scratch(const Stream& stream, const Memory& memory, const DeviceMatrix& m) {
    const std::uint32_t alignment = alignment_of(m.data);
    const std::int64_t stored_rows = m.transposed ? m.cols : m.rows;
    bytes_ = Tensor::empty(memory, {stored_rows * m.ld * size_of(m.dtype) + alignment}, DType::kU8,
                           "gemm.tuning", Category::kWorkspace);
    constexpr int kSmall = 0x3c;  // 0x3c3c is 0.011 in bf16, and so is 0x3c3c3c3c in f32
    check_cuda(cudaMemsetAsync(bytes_.raw(), kSmall, static_cast<std::size_t>(bytes_.numel()),
                               static_cast<cudaStream_t>(stream.native())),
               "cudaMemsetAsync");
    data_ = bytes_.raw() + (alignment < kAlignment ? alignment : 0);
  }
  std::byte* data() const { return data_; }
  DeviceMatrix like(DeviceMatrix m) const {
    m.data = data_;
    return m;
  }

 private:
  Tensor bytes_;
  std::byte* data_;
};

// What cublasLt is to do with a sum besides.
enum class Gelu { kNone, kValue, kSlope };

Gelu gelu_of(const DeviceProduct& p) {
  if (p.slope.at.data != nullptr) return Gelu::kSlope;
  return p.before_gelu.data != nullptr ? Gelu::kValue : Gelu::kNone;
}

// What GELU is taken of: written by the product, or read for the slope.
const DeviceMatrix& aux_of(const DeviceProduct& p) {
  return gelu_of(p) == Gelu::kSlope ? p.slope.at : p.before_gelu;
}

std::uint32_t epilogue_of(Gelu gelu, bool has_bias) {
  if (gelu == Gelu::kValue) return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  if (gelu == Gelu::kSlope) return CUBLASLT_EPILOGUE_DGELU;
  return has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// All that reaches the choice. The values of alpha and beta do not.
struct Key {
  explicit Key(const DeviceProduct& p)
      : a(p.a),
        b(p.b),
        c(p.c),
        has_bias(p.bias != nullptr),
        device_scales(p.scales != nullptr),
        has_sums(p.slope.column_sums.data != nullptr),
        gelu(gelu_of(p)) {}
  std::string text() const {
    return fmt::format("({}, {}) ({}, {}) | {} | {} | {}{}{}{}{}", a.rows, a.cols, b.rows, b.cols,
                       a.text(), b.text(), c.text(), has_bias ? " | bias" : "",
                       device_scales ? " | scales" : "",
                       gelu == Gelu::kValue   ? " | gelu"
                       : gelu == Gelu::kSlope ? " | gelu slope"
                                              : "",
                       has_sums ? " | sums" : "");
  }
  bool operator==(const Key&) const = default;

  Side a, b, c;
  bool has_bias, device_scales;
  bool has_sums;  // after a slope, whose time is that of both
  Gelu gelu;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t hash = static_cast<std::uint64_t>(key.gelu) * 8 + (key.has_sums ? 4 : 0) +
                         (key.has_bias ? 2 : 0) + (key.device_scales ? 1 : 0);
    for (const Side* side : {&key.a, &key.b, &key.c}) {
      for (const std::int64_t part :
           {side->rows, side->cols, side->ld,
            std::int64_t{side->alignment} * 16 + static_cast<std::int64_t>(side->dtype) * 2 +
                (side->transposed ? 1 : 0)})
        hash = std::rotl((hash ^ static_cast<std::uint64_t>(part)) * 0x9E3779B97F4A7C15u, 29);
    }
    return hash;
  }
};

// A product made ready. Row-major C = A B is column-major C^T = B^T A^T, so `b` comes first.
struct Plan {
  explicit Plan(const Key& key) : b(key.b.layout()), a(key.a.layout()), c(key.c.layout()) {
    cublasLtMatmulDesc_t desc = nullptr;
    check(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    operation.reset(desc);
    set(operation, CUBLASLT_MATMUL_DESC_TRANSA, key.b.operation());
    set(operation, CUBLASLT_MATMUL_DESC_TRANSB, key.a.operation());
    set(operation, CUBLASLT_MATMUL_DESC_POINTER_MODE,
        key.device_scales ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST);
    // The bias is added to each column of C^T.
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(key.gelu, key.has_bias));
    if (key.gelu != Gelu::kNone) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.c.ld);
  }

  Operation operation;
  Layout b, a, c;
  bool supported = false;
  cublasLtMatmulAlgo_t algorithm{};
  std::size_t workspace_nbytes = 0;
};

using Candidates = std::vector<cublasLtMatmulHeuristicResult_t>;

// The state of one stream; see Stream::state().
class CublasLt {
 public:
  explicit CublasLt(const Stream& stream) {
    cublasLtHandle_t handle = nullptr;
    check(cublasLtCreate(&handle), "cublasLtCreate");
    handle_.reset(handle);
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, stream.device().index),
               "cudaGetDeviceProperties");
    library_ = fmt::format("cublasLt {} | {}", cublasLtGetVersion(), properties.name);
  }

  const std::string& library() const { return library_; }

  void set_algorithms(std::shared_ptr<GemmAlgorithms> algorithms) {
    algorithms_ = std::move(algorithms);
    plans_.clear();
  }

  bool multiply(const Stream& stream, const Memory& memory, const DeviceProduct& product) {
    const Key key(product);
    auto plan = plans_.find(key);
    if (plan == plans_.end()) {
      Plan made(key);
      choose(key, algorithms_.get(), made);
      plan = plans_.emplace(key, std::move(made)).first;
    }
    if (plan->second.supported) run(stream, memory, product, plan->second);
    return plan->second.supported;
  }

  // Chooses by time, unless there is an entry or nothing to choose from.
  std::optional<TunedGemm> tune(const Stream& stream, const DeviceProduct& recorded,
                                GemmAlgorithms& algorithms) const {
    const Key key(recorded);
    const std::string name = name_of(key);
    if (algorithms.find(name)) return std::nullopt;
    Plan plan(key);
    allow_any_vectors(key, plan);
    const Candidates candidates = propose(plan, key, kMaxCandidates);
    if (candidates.empty()) return std::nullopt;
    const Memory memory(stream);
    const Scratch a(stream, memory, recorded.a), b(stream, memory, recorded.b),
        c(stream, memory, recorded.c);
    const Scratch bias(
        stream, memory,
        {.dtype = recorded.c.dtype, .rows = 1, .cols = recorded.c.cols, .ld = recorded.c.cols});
    const std::vector<float> ones = {1, 0, 1};
    const Tensor scales = Tensor::from<float>(memory, {3}, ones, "gemm.tuning");
    DeviceProduct product{.a = a.like(recorded.a),
                          .b = b.like(recorded.b),
                          .c = c.like(recorded.c),
                          .accumulate = recorded.accumulate,
                          .bias = key.has_bias ? bias.data() : nullptr,
                          .scales = key.device_scales ? scales.data<float>() : nullptr,
                          .before_gelu = {},
                          .gelu = recorded.gelu,
                          .slope = recorded.slope};
    std::optional<Scratch> aux, sums;
    std::optional<double> apart_ms;
    if (key.gelu != Gelu::kNone) {
      aux.emplace(stream, memory, aux_of(recorded));
      (key.gelu == Gelu::kSlope ? product.slope.at : product.before_gelu) =
          aux->like(aux_of(recorded));
      if (key.has_sums) {
        sums.emplace(stream, memory, recorded.slope.column_sums);
        product.slope.column_sums = sums->like(recorded.slope.column_sums);
      }
      apart_ms = time_apart_ms(stream, memory, product, algorithms);
    }
    std::vector<double> times_ms;
    for (const auto& candidate : candidates) {
      take(candidate, plan);
      times_ms.push_back(time_ms(stream, [&] {
        run(stream, memory, product, plan);
        if (key.gelu == Gelu::kSlope)
          product.slope.finish(stream, product.c, product.slope, /*is_sloped=*/true);
      }));
    }
    const auto best = std::ranges::min_element(times_ms);
    const cublasLtMatmulAlgo_t& fastest =
        candidates[static_cast<std::size_t>(best - times_ms.begin())].algo;
    const bool is_apart = apart_ms && *apart_ms <= *best;
    algorithms.insert(name, is_apart ? kApart : std::bit_cast<GemmAlgorithms::Algorithm>(fastest));
    return TunedGemm{.gemm = recorded,
                     .first_ms = apart_ms.value_or(times_ms.front()),
                     .ms = is_apart ? *apart_ms : *best,
                     .num_proposed = static_cast<int>(candidates.size()),
                     .algorithm = is_apart ? "GELU apart" : text_of(fastest)};
  }

 private:
  std::string name_of(const Key& key) const { return library_ + " | " + key.text(); }

  // D = alpha A B + beta C with both C and D at product.c.
  void run(const Stream& stream, const Memory& memory, const DeviceProduct& product,
           const Plan& plan) const {
    void* const c = product.c.data;
    const Tensor workspace =
        Tensor::empty(memory, {static_cast<std::int64_t>(plan.workspace_nbytes)}, DType::kU8,
                      "gemm.workspace", Category::kWorkspace);
    const float host_scales[] = {1, 0, 1};
    const float* scales = product.scales != nullptr ? product.scales : host_scales;
    if (product.bias != nullptr)
      set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    if (const void* const aux = aux_of(product).data; aux != nullptr)
      set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    check(cublasLtMatmul(handle_.get(), plan.operation.get(), scales, product.b.data, plan.b.get(),
                         product.a.data, plan.a.get(), scales + (product.accumulate ? 2 : 1), c,
                         plan.c.get(), c, plan.c.get(), &plan.algorithm,
                         plan.workspace_nbytes > 0 ? workspace.raw() : nullptr,
                         plan.workspace_nbytes, static_cast<cudaStream_t>(stream.native())),
          "cublasLtMatmul");
  }

  // [Note: choosing an algorithm]
  // cublasLt proposes algorithms, best guess first, as a function of the descriptors and the GPU.
  // Only those are asked for that add the parts of a split K in f32 and in a fixed order: so that
  // an element is rounded once, and equal calls give equal bits. By cublasLt.h, COMPUTE_TYPE and
  // OUTPUT_TYPE store the parts in workspace, in f32 and in C's dtype, and reduce them in a
  // separate step, which sees all of them. INPLACE adds each part to C when its turn comes, in C's
  // dtype; counters take care that it is one at a time, and nothing is said of the order.
  Candidates propose(const Plan& plan, const Key& key, int max_candidates) const {
    cublasLtMatmulPreference_t handle = nullptr;
    check(cublasLtMatmulPreferenceCreate(&handle), "cublasLtMatmulPreferenceCreate");
    const Preference preference(handle);
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspace);
    std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (key.c.dtype == DType::kF32) reductions |= CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b.alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a.alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c.alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c.alignment);
    Candidates candidates(static_cast<std::size_t>(max_candidates));
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_.get(), plan.operation.get(), plan.b.get(), plan.a.get(), plan.c.get(), plan.c.get(),
        preference.get(), static_cast<int>(candidates.size()), candidates.data(), &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED)
      count = 0;
    else
      check(status, "cublasLtMatmulAlgoGetHeuristic");
    candidates.resize(static_cast<std::size_t>(count));
    std::erase_if(candidates, [](const auto& c) { return c.state != CUBLAS_STATUS_SUCCESS; });
    return candidates;
  }

  // The choice reads no bias, only how aligned its address is: as little as any that comes.
  static void allow_any_vectors(const Key& key, const Plan& plan) {
    const auto any = std::bit_cast<const void*>(std::uintptr_t{kAlignment});
    if (key.has_bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, any);
    if (key.gelu != Gelu::kNone)
      set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, any);
  }

  // [Note: GELU in products]
  // cublasLt can apply GELU (tanh) to what it has just summed and write both, which saves reading
  // the product again; its kernels may be slower than those without. So a choice by time has an
  // entry for such a product as well, that of the fastest algorithm or kApart: then, and without an
  // entry, the product and GELU run one after the other. The two ways differ in bits: cublasLt
  // takes GELU of the f32 sum, the kernel apart of what it was rounded to.
  //
  // This holds for the slope too: the product that is the gradient of GELU's output can be
  // multiplied with gelu'(h) as it is summed, h being what GELU was taken of. Apart, the product is
  // written to where the gradient of h goes and multiplied there, so that the two ways take the
  // same memory and a plan need not know which it will be. Sums of columns are always ours, and
  // timed with either way: DGELU_BGRAD would make them as well, but rounds them to bf16, and that
  // it adds in a fixed order is not said.
  void choose(const Key& key, const GemmAlgorithms* algorithms, Plan& plan) const {
    allow_any_vectors(key, plan);
    if (algorithms != nullptr) {
      const std::string name = name_of(key);
      const auto algorithm = algorithms->find(name);
      if (algorithm && key.gelu != Gelu::kNone && *algorithm == kApart) return;
      if (algorithm) return adopt(*algorithm, name, plan);
    }
    if (key.gelu != Gelu::kNone) return;
    const Candidates candidates = propose(plan, key, 1);
    if (!candidates.empty()) take(candidates.front(), plan);
  }

  static void take(const cublasLtMatmulHeuristicResult_t& candidate, Plan& plan) {
    plan.algorithm = candidate.algo;
    plan.workspace_nbytes = candidate.workspaceSize;
    plan.supported = true;
  }

  // An algorithm from a file, which may be anything.
  void adopt(const GemmAlgorithms::Algorithm& algorithm, const std::string& name,
             Plan& plan) const {
    cublasLtMatmulHeuristicResult_t result{};
    const auto algo = std::bit_cast<cublasLtMatmulAlgo_t>(algorithm);
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle_.get(), plan.operation.get(), plan.b.get(), plan.a.get(),
                                plan.c.get(), plan.c.get(), &algo, &result);
    require<IoError>(
        status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kMaxWorkspace,
        "[gemm_algorithms] expected an algorithm that cublasLt accepts, got {} and a workspace of "
        "{} bytes ({})",
        cublasLtGetStatusName(status), result.workspaceSize, name);
    result.algo = algo;
    take(result, plan);
  }

  // Of a product and then GELU, or its slope; nothing if cublasLt has no algorithm for the product.
  std::optional<double> time_apart_ms(const Stream& stream, const Memory& memory,
                                      const DeviceProduct& product,
                                      const GemmAlgorithms& algorithms) const {
    const DeviceMatrix& h = product.before_gelu;
    const bool has_slope = gelu_of(product) == Gelu::kSlope;
    DeviceProduct apart = product;
    if (!has_slope) apart.c = h;
    apart.before_gelu = {}, apart.gelu = nullptr, apart.slope = {};
    const Key key(apart);
    Plan plan(key);
    choose(key, &algorithms, plan);
    if (!plan.supported) return std::nullopt;
    return time_ms(stream, [&] {
      run(stream, memory, apart, plan);
      if (has_slope) return product.slope.finish(stream, product.c, product.slope, false);
      product.gelu(stream, h.dtype, product.c.data, h.data, h.rows * h.cols);
    });
  }

  // Of one call, the faster of two turns.
  template <class F>
  static double time_ms(const Stream& stream, const F& call) {
    using Clock = std::chrono::steady_clock;
    const auto time = [&](int num_runs) {
      stream.synchronize();
      const auto begin = Clock::now();
      for (int i = 0; i < num_runs; ++i) call();
      stream.synchronize();
      return std::chrono::duration<double, std::milli>(Clock::now() - begin).count() / num_runs;
    };
    constexpr double kBatch_ms = 2;  // long compared with a start and a wait
    time(1);                         // loads its code
    const int num_runs = static_cast<int>(std::clamp(kBatch_ms / time(1), 1.0, 20.0));
    return std::min(time(num_runs), time(num_runs));
  }

  Handle handle_;
  std::string library_;  // and device
  std::shared_ptr<GemmAlgorithms> algorithms_;
  std::unordered_map<Key, Plan, KeyHash> plans_;
};

// The state of a stream that is asked what it multiplies.
struct GemmRecord {
  explicit GemmRecord(const Stream&) {}
  std::shared_ptr<std::vector<DeviceProduct>> gemms;
};

bool is_for_cublaslt(const DeviceProduct& product) {
  // Kernels read 16 bytes of the bias at a time; choose() promises that much.
  // cublasLt.h asks for a leading dimension of what GELU is taken of that is a multiple of 8.
  // How exact its tanh is, is not said: enough for bf16.
  const DeviceMatrix& aux = aux_of(product);
  return product.a.dtype == product.b.dtype && product.a.cols > 0 &&
         (product.a.dtype == DType::kBF16 || product.c.dtype == DType::kF32) &&
         alignment_of(product.bias) == kAlignment &&
         (aux.data == nullptr || (product.c.dtype == DType::kBF16 && aux.ld % 8 == 0 &&
                                  alignment_of(aux.data) == kAlignment));
}

}  // namespace

bool cublaslt_gemm(const Stream& stream, const Memory& memory, const DeviceProduct& product) {
  return is_for_cublaslt(product) && stream.state<CublasLt>().multiply(stream, memory, product);
}

void note_gemm(const Stream& stream, const DeviceProduct& product) {
  const auto& gemms = stream.state<GemmRecord>().gemms;
  if (gemms == nullptr || !is_for_cublaslt(product)) return;
  DeviceProduct noted = product;
  noted.a = recorded(product.a), noted.b = recorded(product.b), noted.c = recorded(product.c);
  for (DeviceMatrix* const m : {&noted.before_gelu, &noted.slope.at, &noted.slope.column_sums}) {
    if (m->data != nullptr) *m = recorded(*m);
  }
  // Only whether they are there matters.
  static constexpr float kOne = 1;
  if (product.bias != nullptr) noted.bias = std::bit_cast<void*>(std::uintptr_t{kAlignment});
  if (product.scales != nullptr) noted.scales = &kOne;
  if (std::ranges::find(*gemms, noted) == gemms->end()) gemms->push_back(noted);
}

void reserve_gemm_workspace(const Memory& memory) {
  Tensor::empty(memory, {static_cast<std::int64_t>(kMaxWorkspace)}, DType::kU8, "gemm.workspace",
                Category::kWorkspace);
}

void set_gemm_algorithms(const Stream& stream, std::shared_ptr<GemmAlgorithms> algorithms) {
  require(stream.device().is_cuda(), "[gemm] expected a CUDA stream, got {} ({})",
          to_string(stream.device()), stream.name());
  const CurrentGpu current(stream.device().index);
  stream.state<CublasLt>().set_algorithms(std::move(algorithms));
}

std::string gemm_cuda_library(const Stream& stream) {
  const CurrentGpu current(stream.device().index);
  return stream.state<CublasLt>().library();
}

void record_gemms(const Stream& stream, std::shared_ptr<std::vector<DeviceProduct>> gemms) {
  stream.state<GemmRecord>().gemms = std::move(gemms);
}

std::vector<TunedGemm> tune_gemms(const Stream& stream, const std::vector<DeviceProduct>& gemms,
                                  GemmAlgorithms& algorithms) {
  const CurrentGpu current(stream.device().index);
  std::vector<TunedGemm> timed;
  for (const DeviceProduct& gemm : gemms) {
    auto tuned = stream.state<CublasLt>().tune(stream, gemm, algorithms);
    if (tuned) timed.push_back(*std::move(tuned));
  }
  return timed;
}

}  // namespace tessera::engine

#include "engine/gemm/onednn.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <utility>

#include "engine/error.h"
#include "engine/isa.h"
#include "engine/out_of_memory.h"
#include "engine/tensor.h"
#include "oneapi/dnnl/dnnl.h"

namespace tessera::engine {

// What we call, each as the library's header declares it.
struct OneDnn::Functions {
  explicit Functions(void* handle) : library(handle) {}

  struct Symbol {
    void* address;
    template <class F>
    operator F*() const {  // NOLINT(google-explicit-constructor): of the type that is asked for
      return reinterpret_cast<F*>(address);
    }
  };
  Symbol find(const char* name) {
    void* const address = dlsym(library, name);
    is_complete = is_complete && address != nullptr;
    return {address};
  }

  void* library;
  bool is_complete = true;
  decltype(&dnnl_version) version = find("dnnl_version");
  decltype(&dnnl_set_max_cpu_isa) set_max_cpu_isa = find("dnnl_set_max_cpu_isa");
  decltype(&dnnl_get_effective_cpu_isa) get_effective_cpu_isa = find("dnnl_get_effective_cpu_isa");
  decltype(&dnnl_sgemm) sgemm = find("dnnl_sgemm");
  decltype(&dnnl_engine_create) engine_create = find("dnnl_engine_create");
  decltype(&dnnl_engine_destroy) engine_destroy = find("dnnl_engine_destroy");
  decltype(&dnnl_stream_create) stream_create = find("dnnl_stream_create");
  decltype(&dnnl_stream_destroy) stream_destroy = find("dnnl_stream_destroy");
  decltype(&dnnl_memory_desc_init_by_strides) memory_desc_init_by_strides =
      find("dnnl_memory_desc_init_by_strides");
  decltype(&dnnl_memory_desc_get_size) memory_desc_get_size = find("dnnl_memory_desc_get_size");
  decltype(&dnnl_matmul_desc_init) matmul_desc_init = find("dnnl_matmul_desc_init");
  decltype(&dnnl_primitive_attr_create) primitive_attr_create = find("dnnl_primitive_attr_create");
  decltype(&dnnl_primitive_attr_destroy) primitive_attr_destroy =
      find("dnnl_primitive_attr_destroy");
  decltype(&dnnl_primitive_attr_set_scratchpad_mode) primitive_attr_set_scratchpad_mode =
      find("dnnl_primitive_attr_set_scratchpad_mode");
  decltype(&dnnl_primitive_attr_set_post_ops) primitive_attr_set_post_ops =
      find("dnnl_primitive_attr_set_post_ops");
  decltype(&dnnl_post_ops_create) post_ops_create = find("dnnl_post_ops_create");
  decltype(&dnnl_post_ops_destroy) post_ops_destroy = find("dnnl_post_ops_destroy");
  decltype(&dnnl_post_ops_append_sum) post_ops_append_sum = find("dnnl_post_ops_append_sum");
  decltype(&dnnl_primitive_desc_create) primitive_desc_create = find("dnnl_primitive_desc_create");
  decltype(&dnnl_primitive_desc_destroy) primitive_desc_destroy =
      find("dnnl_primitive_desc_destroy");
  decltype(&dnnl_primitive_desc_query_md) primitive_desc_query_md =
      find("dnnl_primitive_desc_query_md");
  decltype(&dnnl_primitive_create) primitive_create = find("dnnl_primitive_create");
  decltype(&dnnl_primitive_destroy) primitive_destroy = find("dnnl_primitive_destroy");
  decltype(&dnnl_primitive_execute) primitive_execute = find("dnnl_primitive_execute");
  decltype(&dnnl_memory_create) memory_create = find("dnnl_memory_create");
  decltype(&dnnl_memory_destroy) memory_destroy = find("dnnl_memory_destroy");
  decltype(&dnnl_memory_set_data_handle) memory_set_data_handle =
      find("dnnl_memory_set_data_handle");
  // Of the OpenMP that the library runs on.
  void (*omp_set_num_threads)(int) = find("omp_set_num_threads");
  int (*omp_get_max_threads)() = find("omp_get_max_threads");
};

namespace {

using Functions = OneDnn::Functions;

void check(dnnl_status_t status, std::string_view call) {
  require<OutOfMemory>(status != dnnl_out_of_memory,
                       "[onednn] expected memory for {}, got none from the system", call);
  require<DeviceError>(status == dnnl_success, "[onednn] expected {} to succeed, got status {}",
                       call, static_cast<int>(status));
}

dnnl_cpu_isa_t onednn_isa(Isa isa) {
  switch (isa) {
    case Isa::kV2:
      return dnnl_cpu_isa_sse41;
    case Isa::kV3:
      return dnnl_cpu_isa_avx2;
    case Isa::kV4:
      return dnnl_cpu_isa_avx512_core_vnni;
    case Isa::kV4Bf16:
      return dnnl_cpu_isa_avx512_core_bf16;
    case Isa::kV4Amx:
      return dnnl_cpu_isa_avx512_core_amx;
  }
  return dnnl_cpu_isa_sse41;
}

// The library asks OpenMP how many threads to take; the number belongs to the calling thread.
class Threads {
 public:
  explicit Threads(const OneDnn& library)
      : f_(library.functions()), before_(f_.omp_get_max_threads()) {
    f_.omp_set_num_threads(library.num_threads());
  }
  ~Threads() { f_.omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  const Functions& f_;
  const int before_;
};

// An object of the library, and what destroys it.
template <class Handle>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, dnnl_status_t (*)(Handle)>;

}  // namespace

OneDnn::OneDnn(std::unique_ptr<const Functions> functions, int num_threads)
    : functions_(std::move(functions)),
      num_threads_(num_threads),
      name_(fmt::format("oneDNN {}.{}.{}", functions_->version()->major,
                        functions_->version()->minor, functions_->version()->patch)) {
  // Refused if the program has used the library before on its own: then it keeps what it has.
  (void)functions_->set_max_cpu_isa(onednn_isa(isa()));
  constexpr int kBf16 = dnnl_cpu_isa_avx512_core_bf16;
  has_bf16_ = (functions_->get_effective_cpu_isa() & kBf16) == kBf16;
}

OneDnn::~OneDnn() = default;

std::unique_ptr<const OneDnn> OneDnn::load(int num_threads) {
  void* const library = dlopen("libdnnl.so.2", RTLD_NOW | RTLD_LOCAL);  // for good
  if (library == nullptr) return nullptr;
  auto functions = std::make_unique<const Functions>(library);
  if (!functions->is_complete) return nullptr;
  return std::make_unique<const OneDnn>(std::move(functions), num_threads);
}

// [Note: kernels without memory]
// The library writes the code of a kernel when it first needs it, into memory that it does not
// check for: without any, it writes to address 0. So before it may need some, a block that is
// larger than what it will ask for is asked of the system, and given back at once.
void OneDnn::check_room(std::string_view call) {
  constexpr std::size_t kCodeNbytes = std::size_t{32} << 20;
  void* const room = ::mmap(nullptr, kCodeNbytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require<OutOfMemory>(room != MAP_FAILED,
                       "[onednn] expected {} bytes for the kernels of {}, got none from the system",
                       kCodeNbytes, call);
  (void)::munmap(room, kCodeNbytes);
}

void OneDnn::sgemm(bool a_transposed, bool b_transposed, std::int64_t m, std::int64_t n,
                   std::int64_t k, const float* a, std::int64_t lda, const float* b,
                   std::int64_t ldb, float beta, float* c, std::int64_t ldc) const {
  const Threads threads(*this);
  const unsigned kind = 1u << ((a_transposed ? 1 : 0) + (b_transposed ? 2 : 0) +
                               (beta == 0 ? 4 : 0) + (m == 1 || n == 1 ? 8 : 0));
  const bool is_new = (sgemm_kinds_.load(std::memory_order_relaxed) & kind) == 0;
  if (is_new) check_room("dnnl_sgemm");
  check(functions_->sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', m, n, k, 1, a, lda, b,
                          ldb, beta, c, ldc),
        "dnnl_sgemm");
  if (is_new) sgemm_kinds_.fetch_or(kind, std::memory_order_relaxed);
}

// bf16
// --------------------------------------------------------------------------------------------

struct Bf16Products::State {
  // One kernel, with its arguments: memory objects are given addresses before each call.
  struct Kernel {
    Owner<dnnl_primitive_t> primitive;
    Owner<dnnl_memory_t> a, b, c, bias, scratch;
    std::int64_t scratch_nbytes;
  };

  explicit State(const OneDnn& the_library)
      : library(the_library),
        f(library.functions()),
        engine(nullptr, f.engine_destroy),
        stream(nullptr, f.stream_destroy) {
    dnnl_engine_t new_engine = nullptr;
    check(f.engine_create(&new_engine, dnnl_cpu, 0), "dnnl_engine_create");
    engine.reset(new_engine);
    dnnl_stream_t new_stream = nullptr;
    check(f.stream_create(&new_stream, new_engine, dnnl_stream_default_flags),
          "dnnl_stream_create");
    stream.reset(new_stream);
  }

  dnnl_memory_desc_t matrix(std::int64_t rows, std::int64_t cols, std::int64_t ld, bool transposed,
                            DType dtype) const {
    dnnl_memory_desc_t desc;
    const dnnl_dims_t dims = {rows, cols};
    const dnnl_dims_t strides = {transposed ? 1 : ld, transposed ? ld : 1};
    check(f.memory_desc_init_by_strides(&desc, 2, dims, dtype == DType::kF32 ? dnnl_f32 : dnnl_bf16,
                                        strides),
          "dnnl_memory_desc_init_by_strides");
    return desc;
  }

  Owner<dnnl_memory_t> memory(const dnnl_memory_desc_t& desc) const {
    dnnl_memory_t memory = nullptr;
    check(f.memory_create(&memory, &desc, engine.get(), DNNL_MEMORY_NONE), "dnnl_memory_create");
    return {memory, f.memory_destroy};
  }

  Owner<dnnl_primitive_attr_t> attributes(bool accumulate) const {
    dnnl_primitive_attr_t attr = nullptr;
    check(f.primitive_attr_create(&attr), "dnnl_primitive_attr_create");
    Owner<dnnl_primitive_attr_t> owner(attr, f.primitive_attr_destroy);
    check(f.primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user),
          "dnnl_primitive_attr_set_scratchpad_mode");
    if (!accumulate) return owner;
    dnnl_post_ops_t ops = nullptr;
    check(f.post_ops_create(&ops), "dnnl_post_ops_create");
    const Owner<dnnl_post_ops_t> ops_owner(ops, f.post_ops_destroy);
    check(f.post_ops_append_sum(ops, 1), "dnnl_post_ops_append_sum");
    check(f.primitive_attr_set_post_ops(attr, ops), "dnnl_primitive_attr_set_post_ops");
    return owner;
  }

  Kernel make(const Bf16Product::Shape& s) const {
    OneDnn::check_room("a product of bf16");
    const auto a = matrix(s.m, s.k, s.lda, s.a_transposed, DType::kBF16);
    const auto b = matrix(s.k, s.n, s.ldb, s.b_transposed, DType::kBF16);
    const auto c = matrix(s.m, s.n, s.ldc, false, s.c_dtype);
    dnnl_matmul_desc_t desc;
    const auto bias = matrix(1, s.n, s.n, false, DType::kBF16);
    check(f.matmul_desc_init(&desc, &a, &b, s.has_bias ? &bias : nullptr, &c),
          "dnnl_matmul_desc_init");
    dnnl_primitive_desc_t pd = nullptr;
    check(
        f.primitive_desc_create(&pd, &desc, attributes(s.accumulate).get(), engine.get(), nullptr),
        "dnnl_primitive_desc_create");
    const Owner<dnnl_primitive_desc_t> pd_owner(pd, f.primitive_desc_destroy);
    const dnnl_memory_desc_t* scratch = f.primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    dnnl_primitive_t primitive = nullptr;
    check(f.primitive_create(&primitive, pd), "dnnl_primitive_create");
    return {.primitive = {primitive, f.primitive_destroy},
            .a = memory(a),
            .b = memory(b),
            .c = memory(c),
            .bias = memory(bias),
            .scratch = memory(*scratch),
            .scratch_nbytes = static_cast<std::int64_t>(f.memory_desc_get_size(scratch))};
  }

  // Made at the first call. The host asks for scratch while the stream runs what it was given
  // before: whoever runs a kernel keeps it.
  std::shared_ptr<const Kernel> kernel(const Bf16Product::Shape& shape) {
    const std::lock_guard lock(mutex);
    auto found = kernels.find(shape);
    if (found == kernels.end()) {
      if (kernels.size() >= kMaxKernels) kernels.clear();
      found = kernels.emplace(shape, std::make_shared<const Kernel>(make(shape))).first;
    }
    return found->second;
  }

  void set(const Owner<dnnl_memory_t>& memory, const void* data) const {
    check(f.memory_set_data_handle(memory.get(), const_cast<void*>(data)),
          "dnnl_memory_set_data_handle");
  }

  const OneDnn& library;
  const Functions& f;
  Owner<dnnl_engine_t> engine;
  Owner<dnnl_stream_t> stream;
  std::mutex mutex;
  std::map<Bf16Product::Shape, std::shared_ptr<const Kernel>> kernels;  // under the mutex
};

Bf16Products::Bf16Products(const OneDnn& library) : state_(std::make_unique<State>(library)) {}

Bf16Products::~Bf16Products() = default;

std::int64_t Bf16Products::scratch_nbytes(const Bf16Product::Shape& shape) {
  const Threads threads(state_->library);
  return state_->kernel(shape)->scratch_nbytes;
}

void Bf16Products::run(const Bf16Product& product, std::byte* scratch) {
  State& s = *state_;
  const Threads threads(s.library);
  const std::shared_ptr<const State::Kernel> kernel = s.kernel(product.shape);
  s.set(kernel->a, product.a);
  s.set(kernel->b, product.b);
  s.set(kernel->c, product.c);
  if (product.bias != nullptr) s.set(kernel->bias, product.bias);
  s.set(kernel->scratch, scratch);
  const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, kernel->a.get()},
                                       {DNNL_ARG_WEIGHTS, kernel->b.get()},
                                       {DNNL_ARG_DST, kernel->c.get()},
                                       {DNNL_ARG_SCRATCHPAD, kernel->scratch.get()},
                                       {DNNL_ARG_BIAS, kernel->bias.get()}};
  check(s.f.primitive_execute(kernel->primitive.get(), s.stream.get(),
                              product.shape.has_bias ? 5 : 4, arguments),
        "dnnl_primitive_execute");
}

}  // namespace tessera::engine

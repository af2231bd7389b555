// oneDNN: matrix products whose kernels are written at run time for the CPU at hand. Private to
// engine/gemm/gemm.cc.
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "engine/dtype.h"

namespace tessera::engine {

/// The library. It is loaded when it is first asked for, so a program needs it neither to be linked
/// nor to start, and it keeps to the instruction set of engine/isa.h.
class OneDnn {
 public:
  /// Null where there is no libdnnl.so.2 that is built for OpenMP. Products take `num_threads`
  /// threads each.
  static std::unique_ptr<const OneDnn> load(int num_threads);
  /// "oneDNN 2.6.3".
  const std::string& name() const { return name_; }

  /// Whether its kernels for bf16 may be used: a program that used the library before may have
  /// limited it.
  bool has_bf16() const { return has_bf16_; }

  /// As BLAS has it, row-major: C (m, n) = op(A) op(B) + beta C. Throws OutOfMemory where the
  /// library would find no memory for its kernels or its scratch.
  void sgemm(bool a_transposed, bool b_transposed, std::int64_t m, std::int64_t n, std::int64_t k,
             const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float beta,
             float* c, std::int64_t ldc) const;

  struct Functions;
  OneDnn(std::unique_ptr<const Functions> functions, int num_threads);
  ~OneDnn();
  const Functions& functions() const { return *functions_; }
  int num_threads() const { return num_threads_; }
  /// Throws OutOfMemory unless there is memory for the code of new kernels; `call` is for the
  /// message. See [Note: kernels without memory] in onednn.cc.
  static void check_room(std::string_view call);

 private:
  std::unique_ptr<const Functions> functions_;
  int num_threads_;
  bool has_bf16_;
  std::string name_;
  mutable std::atomic<unsigned> sgemm_kinds_ = 0;  // bits: those whose kernels are there
};

/// C (m, n) = A (m, k) B (k, n), or C += : A and B bf16, C f32 or bf16, row-major, sums in f32.
struct Bf16Product {
  const void *a, *b;
  void* c;
  const void* bias;  // (n) bf16, added to each row; or null
  struct Shape {
    std::int64_t m, n, k, lda, ldb, ldc;
    bool a_transposed, b_transposed, accumulate, has_bias;
    DType c_dtype;
    auto operator<=>(const Shape&) const = default;
  } shape;
};

/// The kernels that one stream has used, by shape. Where there are too many shapes all are
/// forgotten. run() is for the stream, scratch_nbytes() for any thread while it runs.
class Bf16Products {
 public:
  static constexpr std::size_t kMaxKernels = 1024;
  explicit Bf16Products(const OneDnn& library);
  ~Bf16Products();
  /// What run() needs. Throws DeviceError if the library refuses, as run() does, and OutOfMemory as
  /// OneDnn::sgemm() does.
  std::int64_t scratch_nbytes(const Bf16Product::Shape& shape);
  void run(const Bf16Product& product, std::byte* scratch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::engine

#include "engine/gemm/gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "engine/elementwise.h"
#include "engine/gemm/choice.h"
#include "engine/gemm/direct.h"
#include "engine/gemm/gemm_eigen.h"
#include "engine/gemm/onednn.h"
#include "engine/gemm/pairs.h"
#include "engine/gemm/split.h"
#include "engine/gemm/vector_product.h"
#include "engine/isa.h"

namespace tessera::engine {

namespace {

// What the library is for. Below these numbers of multiplications Eigen is faster, as it starts at
// once. Vectors are another kernel of the library's, whose bits depend on any leading dimension;
// those of its other kernels do where one is a multiple of 256 and k is large.
constexpr std::int64_t kMinOneDnn = 24 * 24 * 24, kMinBf16 = 32 * 32 * 32, kMinSide = 4;
// A transposed A (of a weight gradient) is multiplied some of its stored rows at a time: the
// library's own panels of 384 rows do badly where C has a side of 1536 or 2048 (docs/cpu.md).
constexpr std::int64_t kPanelRows = 256;

// The library for a product (m, k) (k, n), or null for Eigen.
const OneDnn* library_for(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t least) {
  const GemmChoice& c = gemm_choice();
  if (std::min(m, n) < kMinSide || (!c.insists && m * n * k < least)) return nullptr;
  return c.library.get();
}

template <class T>
std::int64_t stored_rows(const MatrixView<T>& m) {
  return m.transposed ? m.cols : m.rows;
}

template <class T>
std::int64_t stored_cols(const MatrixView<T>& m) {
  return m.transposed ? m.rows : m.cols;
}

template <class T>
void check_layout(const MatrixView<T>& m, const char* name) {
  require(m.rows >= 0 && m.cols >= 0 && m.ld >= stored_cols(m),
          "[gemm] expected a leading dimension of at least {}, got {} ({})", stored_cols(m), m.ld,
          name);
}

template <class A, class B, class C>
void check(const MatrixView<A>& a, const MatrixView<B>& b, const MatrixView<C>& c) {
  require(a.cols == b.rows && a.rows == c.rows && b.cols == c.cols,
          "[gemm] expected (M, K) (K, N) -> (M, N), got ({}, {}) ({}, {}) -> ({}, {})", a.rows,
          a.cols, b.rows, b.cols, c.rows, c.cols);
  check_layout(a, "A");
  check_layout(b, "B");
  check_layout(c, "C");
}

// Parts of scratch start where the next one of these ends.
constexpr std::int64_t kScratchAlignment = 256;

std::int64_t aligned(std::int64_t nbytes) {
  return (nbytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// What an f32 copy takes; an f32 matrix is read as it is.
std::int64_t wide_nbytes(const MatrixView<const float>&) { return 0; }
std::int64_t wide_nbytes(const MatrixView<const BFloat16>& m) {
  return aligned(m.rows * m.cols * 4);
}

// An f32 view of `m`: itself, or a widened copy in `scratch`.
MatrixView<const float> widen(const MatrixView<const float>& m, std::byte*) { return m; }

MatrixView<const float> widen(const MatrixView<const BFloat16>& m, std::byte* scratch) {
  const std::int64_t rows = stored_rows(m), cols = stored_cols(m);
  auto* const dst = reinterpret_cast<float*>(scratch);
  with_isa([&] {
    for (std::int64_t i = 0; i < rows; ++i) cast(dst + i * cols, m.data + i * m.ld, cols);
  });
  return {dst, m.rows, m.cols, cols, m.transposed};
}

// Row-major C is column-major C^T = B^T A^T, and each operand changes its order as well.
void add_product_of_eigen(const MatrixView<const float>& a, const MatrixView<const float>& b,
                          const MatrixView<float>& c) {
  const EigenProduct product{.a = b.data,
                             .b = a.data,
                             .c = c.data,
                             .lda = b.ld,
                             .ldb = a.ld,
                             .ldc = c.ld,
                             .m = c.cols,
                             .n = c.rows,
                             .k = a.cols,
                             .a_row_major = b.transposed,
                             .b_row_major = a.transposed};
  isa() >= Isa::kV3 ? v3::add_product(product) : v2::add_product(product);
}

// See [Note: products without packing].
bool is_direct(const MatrixView<const float>& a, const MatrixView<const float>& b) {
  if (isa() < Isa::kV4 || !gemm_choice().is_direct || b.cols < kMinDirectCols) return false;
  const std::int64_t numel = b.rows * b.cols;
  return b.transposed ? a.rows >= kMinTransposedRows && b.rows <= kMaxTransposedDepth &&
                            numel <= kMaxTransposedNumel
                      : a.rows >= kMinSide && numel <= kMaxDirectNumel;
}

// See [Note: a vector at a time].
bool is_of_vector(const MatrixView<const float>& a) {
  return gemm_choice().is_direct && a.rows == 1 && !a.transposed;
}

// Products that are split in parts of bf16: not direct ones, and of sides that are long enough.
std::optional<SplitProduct> split_product(const MatrixView<const float>& a,
                                          const MatrixView<const float>& b,
                                          const MatrixView<float>& c, bool accumulate) {
  if (!splits_f32() || is_direct(a, b)) return std::nullopt;
  const SplitProduct product{.a = a.data,
                             .b = b.data,
                             .c = c.data,
                             .lda = a.ld,
                             .ldb = b.ld,
                             .ldc = c.ld,
                             .m = c.rows,
                             .n = c.cols,
                             .k = a.cols,
                             .a_transposed = a.transposed,
                             .b_transposed = b.transposed,
                             .accumulate = accumulate};
  if (!product.suits()) return std::nullopt;
  return product;
}

// What the product of both needs when they are f32.
template <class A, class B>
std::int64_t split_nbytes(const MatrixView<const A>& a, const MatrixView<const B>& b) {
  const MatrixView<const float> wide_a{nullptr, a.rows, a.cols, a.ld, a.transposed},
      wide_b{nullptr, b.rows, b.cols, b.ld, b.transposed};
  const auto product = split_product(wide_a, wide_b, {nullptr, a.rows, b.cols, b.cols}, false);
  return product ? product->scratch_nbytes() : 0;
}

void multiply_by_library(const OneDnn& library, const MatrixView<const float>& a,
                         const MatrixView<const float>& b, const MatrixView<float>& c,
                         bool accumulate) {
  const std::int64_t num_panels = a.transposed ? std::max<std::int64_t>(a.cols / kPanelRows, 1) : 1;
  const std::int64_t rows = (a.cols + num_panels - 1) / num_panels;
  for (std::int64_t k = 0; k < a.cols; k += rows) {
    library.sgemm(a.transposed, b.transposed, c.rows, c.cols, std::min(rows, a.cols - k),
                  a.data + (a.transposed ? k * a.ld : k), a.ld,
                  b.data + (b.transposed ? k : k * b.ld), b.ld, accumulate || k > 0 ? 1.0f : 0.0f,
                  c.data, c.ld);
  }
}

void set_zero(const MatrixView<float>& c) {
  for (std::int64_t i = 0; i < c.rows; ++i) std::fill_n(c.data + i * c.ld, c.cols, 0.0f);
}

// The bias is where sums start, so adding it costs nothing.
template <class T>
void set_rows(const MatrixView<float>& c, const T* bias) {
  for (std::int64_t i = 0; i < c.rows; ++i) cast(c.data + i * c.ld, bias, c.cols);
}

}  // namespace

Products::Products(const Stream&) {}

Products::~Products() = default;

Bf16Products& Products::bf16() {
  if (bf16_ == nullptr) bf16_ = std::make_unique<Bf16Products>(*gemm_choice().library);
  return *bf16_;
}

int threads_per_product() { return gemm_choice().num_threads; }

bool multiplies_bf16() {
  const OneDnn* const library = gemm_choice().library.get();
  return library != nullptr && isa() >= Isa::kV4Bf16 && library->has_bf16();
}

bool multiplies_pairs() { return isa() == Isa::kV4Bf16 && gemm_choice().is_direct; }

std::string gemm_library() {
  const OneDnn* const library = gemm_choice().library.get();
  const auto [world, major, minor] = v2::kEigenVersion;
  const std::string name =
      library != nullptr ? library->name() : fmt::format("Eigen {}.{}.{}", world, major, minor);
  if (!splits_f32()) return name;
  return name +
         (gemm_choice().asked == CpuGemm::kSplit ? ", f32 split" : ", f32 split without tiles");
}

bool splits_f32() {
  const auto asked = gemm_choice().asked;
  return asked == CpuGemm::kSplit || asked == CpuGemm::kSplitPortable;
}

namespace {

// `scratch` of split_nbytes(), or null where nothing is to be split.
void multiply(const MatrixView<const float>& a, const MatrixView<const float>& b,
              const MatrixView<float>& c, bool accumulate, std::byte* scratch) {
  check(a, b, c);
  if (c.transposed) return multiply(b.t(), a.t(), c.t(), accumulate, scratch);
  if (c.rows == 0 || c.cols == 0) return;
  if (a.cols == 0) return accumulate ? void() : set_zero(c);
  if (is_of_vector(a)) {
    return VectorProduct{.x = a.data,
                         .b = b.data,
                         .y = c.data,
                         .ldb = b.ld,
                         .n = b.cols,
                         .k = a.cols,
                         .b_transposed = b.transposed,
                         .accumulate = accumulate}
        .run();
  }
  if (is_direct(a, b)) {
    return DirectProduct{.a = a.data,
                         .b = b.data,
                         .c = c.data,
                         .lda = a.ld,
                         .ldb = b.ld,
                         .ldc = c.ld,
                         .m = c.rows,
                         .n = c.cols,
                         .k = a.cols,
                         .a_transposed = a.transposed,
                         .b_transposed = b.transposed,
                         .accumulate = accumulate}
        .run();
  }
  if (scratch != nullptr) {
    if (const auto product = split_product(a, b, c, accumulate)) {
      return gemm_choice().asked == CpuGemm::kSplit ? product->run(scratch)
                                                    : product->run_portably(scratch);
    }
  }
  if (const OneDnn* library = library_for(c.rows, c.cols, a.cols, kMinOneDnn)) {
    return multiply_by_library(*library, a, b, c, accumulate);
  }
  if (!accumulate) set_zero(c);
  add_product_of_eigen(a, b, c);
}

}  // namespace

void gemm(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
          bool accumulate) {
  multiply(a, b, c, accumulate, nullptr);
}

namespace {

// The library's product of bf16, where it is that which multiplies.
template <class A, class B, class C>
std::optional<Bf16Product::Shape> bf16_shape(const MatrixView<const A>& a,
                                             const MatrixView<const B>& b, const MatrixView<C>& c,
                                             bool accumulate, bool has_bias) {
  if constexpr (std::is_same_v<A, BFloat16> && std::is_same_v<B, BFloat16>) {
    if (multiplies_bf16() && a.cols > 0 &&
        library_for(c.rows, c.cols, a.cols, kMinBf16) != nullptr) {
      return Bf16Product::Shape{c.rows,     c.cols,   a.cols,           a.ld,
                                b.ld,       c.ld,     a.transposed,     b.transposed,
                                accumulate, has_bias, DTypeOf<C>::value};
    }
  }
  return std::nullopt;
}

}  // namespace

template <class A, class B, class C>
std::int64_t gemm_scratch_nbytes(Products& products, MatrixView<const A> a, MatrixView<const B> b,
                                 MatrixView<C> c, bool accumulate, bool has_bias) {
  if (c.transposed) {
    return gemm_scratch_nbytes(products, b.t(), a.t(), c.t(), accumulate, has_bias);
  }
  if (const auto shape = bf16_shape(a, b, c, accumulate, has_bias)) {
    return products.bf16().scratch_nbytes(*shape);
  }
  const std::int64_t of_sums = std::is_same_v<C, float> ? 0 : c.rows * c.cols * 4;
  const std::int64_t before = wide_nbytes(a) + wide_nbytes(b) + of_sums;
  const std::int64_t of_split = split_nbytes(a, b);
  return of_split == 0 ? before : aligned(before) + of_split;
}

template <class A, class B, class C>
void gemm(Products& products, std::byte* scratch, MatrixView<const A> a, MatrixView<const B> b,
          MatrixView<C> c, bool accumulate, const B* bias) {
  check(a, b, c);
  require(bias == nullptr || (!accumulate && !c.transposed),
          "[gemm] expected a bias of the columns of a C that is assigned");
  if (c.transposed) return gemm(products, scratch, b.t(), a.t(), c.t(), accumulate);
  if (const auto shape = bf16_shape(a, b, c, accumulate, bias != nullptr)) {
    return products.bf16().run({a.data, b.data, c.data, bias, *shape}, scratch);
  }
  const MatrixView<const float> wide_a = widen(a, scratch),
                                wide_b = widen(b, scratch + wide_nbytes(a));
  const bool splits = split_nbytes(a, b) > 0;
  require(!splits || scratch != nullptr, "[gemm] expected scratch for a product that is split");
  std::byte* const behind = scratch + wide_nbytes(a) + wide_nbytes(b);
  if constexpr (std::is_same_v<C, float>) {
    if (bias != nullptr) set_rows(c, bias);
    multiply(wide_a, wide_b, c, accumulate || bias != nullptr, splits ? behind : nullptr);
  } else {
    const MatrixView<float> sums{reinterpret_cast<float*>(behind), c.rows, c.cols, c.cols};
    if (bias != nullptr) set_rows(sums, bias);
    multiply(wide_a, wide_b, sums, bias != nullptr,
             splits ? behind + aligned(c.rows * c.cols * 4) : nullptr);
    with_isa([&] {
      for (std::int64_t i = 0; i < c.rows; ++i) {
        assign_or_add(c.data + i * c.ld, sums.data + i * c.cols, c.cols, accumulate);
      }
    });
  }
}

Tensor gemm_scratch(const Memory& memory, std::int64_t nbytes) {
  if (nbytes == 0) return {};
  return Tensor::empty(memory, {nbytes}, DType::kU8, "gemm.scratch", Category::kWorkspace);
}

template void gemm(Products&, std::byte*, MatrixView<const float>, MatrixView<const float>,
                   MatrixView<float>, bool, const float*);
template void gemm(Products&, std::byte*, MatrixView<const float>, MatrixView<const float>,
                   MatrixView<BFloat16>, bool, const float*);
template void gemm(Products&, std::byte*, MatrixView<const float>, MatrixView<const BFloat16>,
                   MatrixView<float>, bool, const BFloat16*);
template void gemm(Products&, std::byte*, MatrixView<const float>, MatrixView<const BFloat16>,
                   MatrixView<BFloat16>, bool, const BFloat16*);
template void gemm(Products&, std::byte*, MatrixView<const BFloat16>, MatrixView<const float>,
                   MatrixView<float>, bool, const float*);
template void gemm(Products&, std::byte*, MatrixView<const BFloat16>, MatrixView<const float>,
                   MatrixView<BFloat16>, bool, const float*);
template void gemm(Products&, std::byte*, MatrixView<const BFloat16>, MatrixView<const BFloat16>,
                   MatrixView<float>, bool, const BFloat16*);
template void gemm(Products&, std::byte*, MatrixView<const BFloat16>, MatrixView<const BFloat16>,
                   MatrixView<BFloat16>, bool, const BFloat16*);

template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const float>,
                                          MatrixView<const float>, MatrixView<float>, bool, bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const float>,
                                          MatrixView<const float>, MatrixView<BFloat16>, bool,
                                          bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const float>,
                                          MatrixView<const BFloat16>, MatrixView<float>, bool,
                                          bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const float>,
                                          MatrixView<const BFloat16>, MatrixView<BFloat16>, bool,
                                          bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const BFloat16>,
                                          MatrixView<const float>, MatrixView<float>, bool, bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const BFloat16>,
                                          MatrixView<const float>, MatrixView<BFloat16>, bool,
                                          bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const BFloat16>,
                                          MatrixView<const BFloat16>, MatrixView<float>, bool,
                                          bool);
template std::int64_t gemm_scratch_nbytes(Products&, MatrixView<const BFloat16>,
                                          MatrixView<const BFloat16>, MatrixView<BFloat16>, bool,
                                          bool);

}  // namespace tessera::engine

#include <cblas.h>
#include <fmt/format.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/elementwise.h"
#include "engine/gemm/amx_tiles.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/split.h"
#include "engine/isa.h"
#include "engine/parameter.h"
#include "tools/bench/parts.h"
#include "tools/rates/peak.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using engine::BFloat16;
using engine::DType;
using engine::Memory;
using engine::Tensor;

struct Product {
  const char* use;
  std::int64_t m, n, k;
  bool a_transposed = false, b_transposed = false;

  std::string name() const {
    return fmt::format("{}x{}x{} {}{} {}", m, n, k, a_transposed ? 'T' : 'N',
                       b_transposed ? 'T' : 'N', use);
  }
};

// The products of a 384-wide transformer block at 1024 rows (batch 4), at 256 rows (batch 1), of a
// 128-wide one, and of attention heads.
constexpr Product kProducts[] = {
    {"mlp.c_fc", 1024, 1536, 384},
    {"mlp.c_proj", 1024, 384, 1536},
    {"attn.c_attn", 1024, 1152, 384},
    {"attn.c_proj", 1024, 384, 384},
    {"mlp.c_fc dw", 384, 1536, 1024, true, false},
    {"mlp.c_proj dw", 1536, 384, 1024, true, false},
    {"attn.c_attn dx", 1024, 384, 1152, false, true},
    {"logits", 1024, 256, 384, false, true},
    {"mlp.c_fc, batch 1", 256, 1536, 384},
    {"mlp.c_fc dw, batch 1", 384, 1536, 256, true, false},
    {"mlp.c_fc, width 128", 1024, 512, 128},
    {"mlp.c_proj, width 128", 1024, 128, 512},
    {"attention scores", 256, 256, 64, false, true},
    {"attention values", 256, 64, 256},
    {"square", 512, 512, 512},
    {"tile", 64, 64, 64},
    {"tiny", 32, 32, 13},
};

Tensor normal(const Memory& memory, std::int64_t rows, std::int64_t cols, const char* name) {
  const Tensor t = Tensor::empty(memory, {rows, cols}, DType::kF32, name);
  engine::Init::normal(1).write(t.data<float>(), 0, t.numel(), name, 1);
  return t;
}

Tensor to_bf16(const Memory& memory, const Tensor& x) {
  const Tensor y = Tensor::empty(memory, x.shape(), DType::kBF16, x.name());
  engine::cast(y, x);
  return y;
}

template <class T>
engine::MatrixView<const T> view(const Tensor& x, bool transposed) {
  const auto stored = engine::matrix<const T>(x, x.dim(0), x.dim(1));
  return transposed ? stored.t() : stored;
}

// The product in parts of bf16, as --cpu.gemm=split has it where it is large enough.
std::function<void()> split_product(const Product& p, const Tensor& a, const Tensor& b,
                                    const Tensor& c, const Memory& memory) {
  const engine::SplitProduct product{.a = a.data<float>(),
                                     .b = b.data<float>(),
                                     .c = c.data<float>(),
                                     .lda = a.dim(1),
                                     .ldb = b.dim(1),
                                     .ldc = c.dim(1),
                                     .m = p.m,
                                     .n = p.n,
                                     .k = p.k,
                                     .a_transposed = p.a_transposed,
                                     .b_transposed = p.b_transposed,
                                     .accumulate = false};
  return [=, scratch = engine::gemm_scratch(memory, product.scratch_nbytes())] {
    product.run(scratch.raw());
  };
}

}  // namespace

void bench_gemm(const BenchConfig& config, BenchReport& report) {
  openblas_set_num_threads(1);
  const double peak = peak_gflop_per_s();
  report.note(fmt::format("{}, {}; peak: {:.1f} GFLOP/s", name_of(engine::isa()),
                          engine::gemm_library(), peak));
  const bool has_tiles = engine::isa() >= engine::Isa::kV4Amx;
  if (has_tiles) engine::request_amx();
  std::vector<std::string> columns = {
      "product", "f32_gflop_per_s", "of_peak", "openblas_gflop_per_s", "ratio", "bf16_gflop_per_s"};
  if (has_tiles) columns.insert(columns.end(), {"split_gflop_per_s", "split_ratio"});
  report.begin_table(
      "gemm",
      "Matrix products (M x N x K), one thread. of_peak: f32 to what registers can do; ratio: f32 "
      "to OpenBLAS; bf16: operands stored so, f32 result; split: f32 as six products of bf16, and "
      "its ratio to f32, on CPUs with AMX",
      columns);
  const Memory memory;
  engine::Products products(engine::Stream::inline_cpu("compute"));
  for (const Product& p : kProducts) {
    if (!config.wants(p.name())) continue;
    const bool ta = p.a_transposed, tb = p.b_transposed;
    const Tensor a = normal(memory, ta ? p.k : p.m, ta ? p.m : p.k, "a");
    const Tensor b = normal(memory, tb ? p.n : p.k, tb ? p.k : p.n, "b");
    const Tensor a16 = to_bf16(memory, a), b16 = to_bf16(memory, b);
    const Tensor c = Tensor::empty(memory, {p.m, p.n}, DType::kF32, "c");
    const auto out = engine::matrix<float>(c, p.m, p.n);
    const auto blas_int = [](std::int64_t n) { return static_cast<blasint>(n); };
    std::vector<std::function<void()>> functions = {
        [&] { engine::gemm(view<float>(a, ta), view<float>(b, tb), out, false); },
        [&] {
          cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans,
                      blas_int(p.m), blas_int(p.n), blas_int(p.k), 1, a.data<float>(),
                      blas_int(a.dim(1)), b.data<float>(), blas_int(b.dim(1)), 0, c.data<float>(),
                      blas_int(p.n));
        },
        [&] {
          engine::gemm(products, memory, view<BFloat16>(a16, ta), view<BFloat16>(b16, tb), out,
                       false);
        }};
    if (has_tiles) functions.push_back(split_product(p, a, b, c, memory));
    const auto times = time_in_turn(functions, config.samples);
    const auto gflops = [&](const Measurement& t) {
      return engine::gemm_flops(p.m, p.n, p.k) / t.median_ms * 1e-6;
    };
    std::vector<Cell> row = {p.name(),
                             gflops(times[0]),
                             Cell(gflops(times[0]) / peak, 2),
                             gflops(times[1]),
                             Cell(times[1].median_ms / times[0].median_ms, 2),
                             gflops(times[2])};
    if (has_tiles) {
      row.emplace_back(gflops(times[3]));
      row.emplace_back(times[0].median_ms / times[3].median_ms, 2);
    }
    report.row(row);
  }
}

}  // namespace tessera::tools

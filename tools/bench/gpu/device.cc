#include "tools/bench/gpu/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/gemm/gemm_cuda.h"
#include "engine/parameter.h"
#include "tools/machine/limits.h"
#include "tools/rates/gpu_rates.h"
#include "tools/rates/machine_rates.h"

namespace tessera::tools {

using engine::DType;
using engine::Stream;
using engine::Tensor;

namespace {

// "8192x3072x768 NT bf16 bf16 f32 bias": rows, columns and depth; transposed or not; dtypes.
[[maybe_unused]] std::string text_of(const engine::DeviceProduct& p) {
  const auto letter = [](const engine::DeviceMatrix& m) { return m.transposed ? 'T' : 'N'; };
  return fmt::format("{}x{}x{} {}{} {} {} {}{}", p.c.rows, p.c.cols, p.a.cols, letter(p.a),
                     letter(p.b), name_of(p.a.dtype), name_of(p.b.dtype), name_of(p.c.dtype),
                     p.bias != nullptr ? p.before_gelu.data != nullptr ? " bias gelu" : " bias"
                     : p.slope.at.data != nullptr ? " gelu slope"
                                                  : "");
}

}  // namespace

double Ceilings::percent(double gflop_per_s, double gb) const {
  return 100 * std::max(gflop_per_s / bf16_gflop_per_s, gb / gb_per_s);
}

Ceilings measure_ceilings(std::int64_t side, std::int64_t num_samples, BenchReport& report) {
  report.begin_table("device", "What GPU 0 reaches: bytes read and written, a matrix product",
                     {"what", "gb_per_s", "tflop_per_s"});
  const GpuRates rates = measure_gpu(0, side, num_samples);
  report.row({"copy", rates.copy_gb_per_s, "-"});
  report.row({"y += x, f32", rates.add_gb_per_s, "-"});
  report.row({"product f32", "-", rates.f32_gflop_per_s * 1e-3});
  report.row({"product bf16", "-", rates.bf16_gflop_per_s * 1e-3});
  int num_gpus = 1;
  if constexpr (engine::kCudaBuilt) num_gpus = engine::cuda::num_devices();
  const double host = host_bytes_per_s(num_gpus, read_limits().usable_cores());
  for (const auto& [dtype, gflop_per_s] :
       {std::pair{"f32", rates.f32_gflop_per_s}, std::pair{"bf16", rates.bf16_gflop_per_s}}) {
    report.note(fmt::format("plan --device=cuda --precision.param={} {}", dtype,
                            rates_flags({.flops_per_s = gflop_per_s * 1e9,
                                         .bytes_per_s = rates.copy_gb_per_s * 1e9,
                                         .link_bytes_per_s = 0,
                                         .link_latency_s = 0,
                                         .host_link_bytes_per_s = rates.pinned_gb_per_s * 1e9,
                                         .host_bytes_per_s = host})));
  }
  return {.gb_per_s = std::max(rates.copy_gb_per_s, rates.add_gb_per_s),
          .f32_gflop_per_s = rates.f32_gflop_per_s,
          .bf16_gflop_per_s = rates.bf16_gflop_per_s};
}

void measure_gemms(const std::vector<TrainingRow>& rows, const Ceilings& ceilings,
                   const std::function<bool()>& is_late, BenchReport& report) {
  report.begin_table("gemm",
                     "Matrix products of a step: the first algorithm that cublasLt proposes, and "
                     "the fastest; ceiling_pct: of the bf16 product that the GPU reaches",
                     {"product", "gflop", "first_ms", "best_ms", "ratio", "tflop_per_s",
                      "ceiling_pct", "proposed", "algorithm"});
  if constexpr (engine::kCudaBuilt) {
    const Stream stream = Stream::cuda("tuning", 0);
    engine::GemmAlgorithms algorithms;  // so that none is timed twice
    for (TrainingRow row : rows) {
      for (const std::int64_t vocab : {row.model.vocab, (row.model.vocab + 127) / 128 * 128}) {
        row.model.vocab = vocab;
        for (const engine::DeviceProduct& gemm : gemms_of(row)) {
          if (is_late()) return report.note("skipped for lack of time: further products");
          for (const engine::TunedGemm& t : engine::tune_gemms(stream, {gemm}, algorithms)) {
            const double gflop = engine::gemm_flops(gemm.c.rows, gemm.c.cols, gemm.a.cols) * 1e-9;
            report.row({text_of(gemm), Cell(gflop), Cell(t.first_ms, 4), Cell(t.ms, 4),
                        Cell(t.first_ms / t.ms, 2), Cell(gflop / t.ms),
                        Cell(ceilings.percent(gflop / t.ms * 1e3, 0)), t.num_proposed,
                        t.algorithm});
          }
        }
      }
    }
  }
}

}  // namespace tessera::tools

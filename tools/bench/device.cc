#include "tools/bench/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/gemm/gemm_cuda.h"
#include "engine/parameter.h"
#include "tools/bench/timing.h"

namespace tessera::tools {

using engine::DType;
using engine::Stream;
using engine::Tensor;

namespace {

// The time of `launch` on `stream`, several at a time so that the host is out of the way.
double median_ms(const Stream& stream, std::int64_t num_samples,
                 const std::function<void()>& launch) {
  constexpr int kCalls = 8;
  const auto times = time_in_turn({[&] {
                                    for (int call = 0; call < kCalls; ++call) launch();
                                    stream.synchronize();
                                  }},
                                  num_samples);
  return times[0].median_ms / kCalls;
}

// A GPU multiplies zeros faster than numbers. Repeats, so that drawing takes no time.
std::vector<float> normal_values(std::int64_t numel) {
  constexpr std::int64_t kPeriod = 1'000'003;
  std::vector<float> values(static_cast<std::size_t>(numel));
  const std::int64_t drawn = std::min(numel, kPeriod);
  engine::Init::normal(1).write(values.data(), 0, drawn, "ceilings", 1);
  for (std::int64_t i = drawn; i < numel; ++i) {
    values[static_cast<std::size_t>(i)] = values[static_cast<std::size_t>(i - drawn)];
  }
  return values;
}

double product_gflop_per_s(const Stream& stream, const engine::Memory& memory, const Tensor& a,
                           std::int64_t num_samples) {
  const std::int64_t side = a.dim(0);
  const Tensor c = Tensor::empty(memory, a.shape(), a.dtype(), "c");
  const engine::DeviceProduct product{.a = engine::device_matrix(a, side, side),
                                      .b = engine::device_matrix(a, side, side),
                                      .c = engine::device_matrix(c, side, side)};
  const double ms = median_ms(stream, num_samples, [&] {
    stream.launch(
        {.name = "product"}, [] {},
        [&](const auto& on) { engine::gemm_cuda(on, memory, product); });
  });
  return engine::gemm_flops(side, side, side) / ms * 1e-6;
}

// "8192x3072x768 NT bf16 bf16 f32 bias": rows, columns and depth; transposed or not; dtypes.
std::string text_of(const engine::DeviceProduct& p) {
  const auto letter = [](const engine::DeviceMatrix& m) { return m.transposed ? 'T' : 'N'; };
  return fmt::format("{}x{}x{} {}{} {} {} {}{}", p.c.rows, p.c.cols, p.a.cols, letter(p.a),
                     letter(p.b), name_of(p.a.dtype), name_of(p.b.dtype), name_of(p.c.dtype),
                     p.bias != nullptr ? " bias" : "");
}

}  // namespace

double Ceilings::percent(double gflop_per_s, double gb) const {
  return 100 * std::max(gflop_per_s / bf16_gflop_per_s, gb / gb_per_s);
}

Ceilings measure_ceilings(std::int64_t side, std::int64_t num_samples, BenchReport& report) {
  const Stream stream = Stream::cuda("ceilings", 0);
  const engine::Memory memory(stream);
  report.begin_table("device", "What GPU 0 reaches: bytes read and written, a matrix product",
                     {"what", "gb_per_s", "tflop_per_s"});
  Ceilings ceilings;
  {
    const Tensor x = Tensor::zeros(memory, {4, side, side}, DType::kF32, "x");
    const Tensor y = Tensor::zeros(memory, x.shape(), DType::kF32, "y");
    const auto gb_per_s = [&](double nbytes, const std::function<void()>& launch) {
      return nbytes / median_ms(stream, num_samples, launch) * 1e-6;
    };
    const auto nbytes = static_cast<double>(x.nbytes());
    const double copy = gb_per_s(2 * nbytes, [&] { engine::copy(y, x, stream); });
    const double add =
        gb_per_s(3 * nbytes, [&] { engine::launch_assign_or_add(stream, y, x, true, "add"); });
    report.row({"copy", copy, "-"});
    report.row({"y += x, f32", add, "-"});
    ceilings.gb_per_s = std::max(copy, add);
  }
  const Tensor a = Tensor::from<float>(memory, {side, side}, normal_values(side * side), "a");
  const Tensor a16 = Tensor::empty(memory, a.shape(), DType::kBF16, "a16");
  engine::launch_assign_or_add(stream, a16, a, false, "narrow");
  ceilings.f32_gflop_per_s = product_gflop_per_s(stream, memory, a, num_samples);
  ceilings.bf16_gflop_per_s = product_gflop_per_s(stream, memory, a16, num_samples);
  report.row({"product f32", "-", ceilings.f32_gflop_per_s * 1e-3});
  report.row({"product bf16", "-", ceilings.bf16_gflop_per_s * 1e-3});
  return ceilings;
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

#include "tools/rates/peak.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/gemm/gemm.h"
#include "engine/isa.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

// kLanes chains: as many as hide the latency of an addition and still fit into registers differs by
// instruction set, as does whether a fused operation is one.
template <int kLanes, bool kFused>
double gflop_per_s(std::int64_t num_samples) {
  constexpr int kRounds = 20'000;
  float x[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = 1 + 1e-3f * static_cast<float>(l);
  const auto times =
      time_in_turn({[&] {
                     engine::with_isa([&] {
                       for (int i = 0; i < kRounds; ++i) {
                         for (int l = 0; l < kLanes; ++l)
                           x[l] = kFused ? std::fma(x[l], 0.999f, 0.001f) : x[l] * 0.999f + 0.001f;
                       }
                     });
                   }},
                   num_samples);
  const bool is_used = std::isfinite(*std::max_element(x, x + kLanes));
  return is_used ? 2.0 * kLanes * kRounds / times[0].min_ms * 1e-6 : 0;
}

}  // namespace

double peak_gflop_per_s(std::int64_t num_samples) {
  std::vector<double> rates = {
      gflop_per_s<32, false>(num_samples), gflop_per_s<48, false>(num_samples),
      gflop_per_s<96, false>(num_samples), gflop_per_s<192, false>(num_samples)};
  if (engine::isa() >= engine::Isa::kV3) {  // below, a function of libm
    rates.insert(rates.end(),
                 {gflop_per_s<64, true>(num_samples), gflop_per_s<96, true>(num_samples),
                  gflop_per_s<192, true>(num_samples)});
  }
  return *std::ranges::max_element(rates);
}

double settled_peak(double product_gflop_per_s, const std::function<double()>& measure) {
  constexpr int kMostAgain = 3;
  double peak = measure();
  for (int i = 0; i < kMostAgain && peak < product_gflop_per_s; ++i) {
    peak = std::max(peak, measure());
  }
  return peak;
}

double product_gflop_per_s(engine::DType dtype, std::int64_t num_samples) {
  constexpr std::int64_t kRows = 1024, kIn = 384, kOut = 1536;
  const engine::Memory memory;
  engine::Products products(engine::Stream::inline_cpu("compute"));
  const auto zeros = [&](std::int64_t rows, std::int64_t cols, engine::DType type) {
    return engine::Tensor::zeros(memory, {rows, cols}, type);
  };
  const engine::Tensor x = zeros(kRows, kIn, dtype), w = zeros(kIn, kOut, dtype);
  const engine::Tensor y = zeros(kRows, kOut, engine::DType::kF32);
  const auto times =
      time_in_turn({[&] {
                     engine::dispatch_float(dtype, "bench", [&](auto type) {
                       using T = decltype(type);
                       engine::gemm(products, memory, engine::matrix<const T>(x, kRows, kIn),
                                    engine::matrix<const T>(w, kIn, kOut),
                                    engine::matrix<float>(y, kRows, kOut), false);
                     });
                   }},
                   num_samples);
  return engine::gemm_flops(kRows, kOut, kIn) / times[0].min_ms * 1e-6;
}

double copy_gb_per_s(std::size_t nbytes) {
  const std::vector<std::byte> from(nbytes);
  std::vector<std::byte> to(nbytes);
  const auto times = time_in_turn({[&] { std::memcpy(to.data(), from.data(), nbytes); }}, 5);
  return 2.0 * static_cast<double>(nbytes) / times[0].min_ms * 1e-6;
}

}  // namespace tessera::tools

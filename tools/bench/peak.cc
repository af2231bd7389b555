#include "tools/bench/peak.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "engine/isa.h"

namespace tessera::tools {
namespace {

double best_seconds(int num_tries, const std::function<void()>& fn) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < num_tries; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    fn();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

// kLanes chains: as many as hide the latency of an addition and still fit into registers differs by
// instruction set, as does whether a fused operation is one.
template <int kLanes, bool kFused>
double flop_per_s() {
  constexpr int kRounds = 20'000;
  float x[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = 1 + 1e-3f * static_cast<float>(l);
  const double seconds = best_seconds(20, [&] {
    engine::with_isa([&] {
      for (int i = 0; i < kRounds; ++i) {
        for (int l = 0; l < kLanes; ++l)
          x[l] = kFused ? std::fma(x[l], 0.999f, 0.001f) : x[l] * 0.999f + 0.001f;
      }
    });
  });
  const bool is_used = std::isfinite(*std::max_element(x, x + kLanes));
  return is_used ? 2.0 * kLanes * kRounds / seconds : 0;
}

}  // namespace

double peak_gflop_per_s() {
  std::vector<double> rates = {flop_per_s<32, false>(), flop_per_s<48, false>(),
                               flop_per_s<96, false>(), flop_per_s<192, false>()};
  if (engine::isa() >= engine::Isa::kV3) {  // below, a function of libm
    rates.insert(rates.end(),
                 {flop_per_s<64, true>(), flop_per_s<96, true>(), flop_per_s<192, true>()});
  }
  return *std::ranges::max_element(rates) * 1e-9;
}

double copy_gb_per_s() {
  constexpr std::size_t kNbytes = std::size_t{256} << 20;
  const std::vector<std::byte> from(kNbytes);
  std::vector<std::byte> to(kNbytes);
  const double seconds = best_seconds(5, [&] { std::memcpy(to.data(), from.data(), kNbytes); });
  return 2.0 * static_cast<double>(kNbytes) / seconds * 1e-9;
}

}  // namespace tessera::tools

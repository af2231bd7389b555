#include "tools/rates/timing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::tools {

double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

Measurement Measurement::of(const std::vector<double>& samples_ms) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  if (samples_ms.empty()) return {kNaN, kNaN, kNaN};
  const auto [min, max] = std::minmax_element(samples_ms.begin(), samples_ms.end());
  return {median(samples_ms), *min, *max};
}

std::vector<Measurement> time_in_turn(const std::vector<std::function<void()>>& functions,
                                      std::int64_t num_samples) {
  constexpr double kMinSampleMs = 5;
  std::vector<int> num_calls;
  for (const auto& fn : functions) {
    fn();
    const Timer timer;
    fn();
    num_calls.push_back(static_cast<int>(
        std::clamp(std::ceil(kMinSampleMs / std::max(timer.ms(), 1e-6)), 1.0, 1e6)));
  }
  std::vector<std::vector<double>> samples(functions.size());
  for (std::int64_t s = 0; s < num_samples; ++s) {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const Timer timer;
      for (int call = 0; call < num_calls[i]; ++call) functions[i]();
      samples[i].push_back(timer.ms() / num_calls[i]);
    }
  }
  std::vector<Measurement> measurements;
  for (const auto& s : samples) measurements.push_back(Measurement::of(s));
  return measurements;
}

}  // namespace tessera::tools

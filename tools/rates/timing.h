// Times of something done several times, and how they are taken: what is compared is done in turn,
// so that a change in the machine's load or clock meets all sides.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::tools {

/// Wall time since construction or restart.
class Timer {
 public:
  double ms() const {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin_).count();
  }
  /// ms() so far; starts again.
  double restart() {
    const Clock::time_point begin = begin_;
    begin_ = Clock::now();
    return std::chrono::duration<double, std::milli>(begin_ - begin).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

/// Middle value, the mean of both for an even number; NaN of nothing.
double median(std::vector<double> values);

/// The median of samples that each take as long as the slowest rank's.
template <class T>
double median_of_slowest(const std::vector<T>& ranks, std::vector<double> T::*field) {
  std::vector<double> slowest = ranks[0].*field;
  for (const T& rank : ranks) {
    for (std::size_t s = 0; s < slowest.size(); ++s) {
      slowest[s] = std::max(slowest[s], (rank.*field)[s]);
    }
  }
  return median(slowest);
}

/// NaN when nothing was measured.
struct Measurement {
  double median_ms, min_ms, max_ms;

  static Measurement of(const std::vector<double>& samples_ms);
};

/// Calls each function `num_samples` times in turn, after one call of each that does not count. A
/// sample of a function shorter than 5 ms is the mean over as many calls as fill them.
std::vector<Measurement> time_in_turn(const std::vector<std::function<void()>>& functions,
                                      std::int64_t num_samples);

}  // namespace tessera::tools

// What the parts of a step take of the time of all steps.
//
// [Note: shares add up, medians do not] The median step less the medians of its parts is no time
// that anything took: a part that is long in some steps and another that is long in others are both
// short in the median. Sums do add up, so shares are of sums.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace tessera::tools {

class TimeSplit {
 public:
  explicit TimeSplit(std::size_t num_parts) : parts_ms_(num_parts) {}

  /// One step. A part that is not known takes nothing of it.
  void add(double step_ms, std::span<const std::optional<double>> parts_ms) {
    steps_ms_ += step_ms;
    for (std::size_t i = 0; i < parts_ms_.size(); ++i) {
      if (parts_ms[i]) parts_ms_[i] = parts_ms_[i].value_or(0) + *parts_ms[i];
    }
  }

  /// Of the time of all steps, 0 to 1; nothing of a part that no step knows.
  std::optional<double> share(std::size_t part) const {
    if (!parts_ms_[part]) return std::nullopt;
    return *parts_ms_[part] / steps_ms_;
  }

 private:
  double steps_ms_ = 0;
  std::vector<std::optional<double>> parts_ms_;
};

}  // namespace tessera::tools

// How much communication is hidden behind computation: arithmetic on the times of launches.
//
//   comm_times({{0, 10}}, {{4, 20}})   // {.comm_ms = 10e-6, .hidden_ms = 6e-6, .exposed_ms = 4e-6}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/io/jsonl.h"

namespace tessera::tools {

/// From `begin_ns` to before `end_ns`, of any one clock.
struct Interval {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  friend bool operator==(const Interval&, const Interval&) = default;
};

/// The moments of `intervals`, in order, as intervals that do not touch each other. What is empty
/// is left out.
std::vector<Interval> merge(std::vector<Interval> intervals);
/// How long merged intervals last together.
std::int64_t length_ns(const std::vector<Interval>& merged);
/// How long both of two merged ones last at the same time.
std::int64_t common_ns(const std::vector<Interval>& a, const std::vector<Interval>& b);

/// comm_ms = hidden_ms + exposed_ms, but for rounding.
struct CommTimes {
  double comm_ms = 0;     ///< in which something was sent; once, if several things were
  double hidden_ms = 0;   ///< of these, while something was computed
  double exposed_ms = 0;  ///< while nothing was
};

CommTimes comm_times(const std::vector<Interval>& comm, const std::vector<Interval>& compute);

/// Of a step, or the mean of several.
struct Overlap {
  double compute_ms = 0;  ///< in which something was computed
  CommTimes comm = {};    ///< of all kinds
  /// By what is sent: "parameters", "gradients", "offload", "other". Their sum is more than `comm`
  /// where two are sent at the same time.
  std::map<std::string, CommTimes> kinds = {};
};

/// {"compute_ms":..,"comm_ms":..,"hidden_ms":..,"exposed_ms":..,"kinds":{"gradients":{"comm_ms":...
JsonRecord record_of(const Overlap& overlap);

/// A kind that some of them lack counts as 0 there. Of none: all 0.
Overlap mean_of(const std::vector<Overlap>& overlaps);

}  // namespace tessera::tools

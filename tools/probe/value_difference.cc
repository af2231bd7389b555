#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/probe/divergence.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

ValueDifference difference_of(std::span<const float> a, std::span<const float> b) {
  require(a.size() == b.size(), "[divergence] expected as many values, got {} and {}", a.size(),
          b.size());
  // Neighbouring floats are neighbours here, negative ones below zero.
  const auto ordered = [](float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return bits < 0 ? std::int64_t{std::numeric_limits<std::int32_t>::min()} - bits
                    : std::int64_t{bits};
  };
  ValueDifference d;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(a[i]) == std::bit_cast<std::uint32_t>(b[i])) continue;
    if (d.num_differing++ == 0) {
      d.first_index = static_cast<std::int64_t>(i);
      d.a = a[i];
      d.b = b[i];
    }
    const double distance = std::abs(double{a[i]} - double{b[i]});
    if (std::isnan(distance)) {  // which has no neighbours
      d.max_abs = distance;
      continue;
    }
    if (distance > d.max_abs) d.max_abs = distance;
    d.max_ulps = std::max(d.max_ulps, std::abs(ordered(a[i]) - ordered(b[i])));
  }
  return d;
}

std::vector<float> values_of(const ProbeRun& run, const ProbeKey& key, int rank) {
  std::map<std::int64_t, const ProbePart*> parts;
  for (const ProbePart& part : run.parts) {
    if (part.key != key) continue;
    const ProbePart*& chosen = parts[part.begin];
    const bool is_asked = part.rank == rank && rank >= 0;
    const bool has_asked = chosen != nullptr && chosen->rank == rank && rank >= 0;
    if (chosen == nullptr || is_asked || (!has_asked && part.rank < chosen->rank)) chosen = &part;
  }
  std::vector<float> values;
  for (const auto& [begin, part] : parts) {
    require<IoError>(begin == std::ssize(values) && !part->values.empty(),
                     "[divergence] expected all values of {}, got some ({})",
                     engine::excerpt(key.tensor), run.path);
    values.insert(values.end(), part->values.begin(), part->values.end());
  }
  require<IoError>(!parts.empty() && std::ssize(values) == numel_of(parts.begin()->second->shape),
                   "[divergence] expected all values of {}, got {} ({})",
                   engine::excerpt(key.tensor), values.size(), run.path);
  return values;
}

}  // namespace tessera::tools

#include "tools/compare/comparison/speed.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/philox.h"

namespace tessera::tools {
namespace {

constexpr double kMaxErrorRate = 0.05;  // of the whole table

// How many of the smallest, and of the largest, of `num_rounds` sorted values lie outside of the
// interval of their median; negative: there are too few to have one.
std::int64_t num_outside(std::int64_t num_rounds, std::size_t num_configurations) {
  const auto n = static_cast<double>(num_configurations);
  const double max_tail = kMaxErrorRate / (n * (n - 1));  // half of a pair's rate, at either end
  double heads = std::exp2(-static_cast<double>(num_rounds));  // the probability of k heads
  double tail = 0;
  std::int64_t k = 0;
  for (; 2 * k < num_rounds; ++k) {
    tail += heads;
    if (tail > max_tail) break;
    heads *= static_cast<double>(num_rounds - k) / static_cast<double>(k + 1);
  }
  return k - 1;
}

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

std::int64_t rounds_needed(std::size_t num_configurations) {
  std::int64_t num_rounds = 2;
  while (num_outside(num_rounds, num_configurations) < 0) ++num_rounds;
  return num_rounds;
}

std::optional<RatioInterval> ratio_interval(std::span<const double> a, std::span<const double> b,
                                            std::size_t num_configurations) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  const std::int64_t outside = num_outside(std::ssize(ratios), num_configurations);
  if (outside < 0) return std::nullopt;
  std::ranges::sort(ratios);
  const auto first = static_cast<std::size_t>(outside);
  return RatioInterval{
      .middle = median_of(ratios), .low = ratios[first], .high = ratios[ratios.size() - 1 - first]};
}

std::vector<std::size_t> order_of_round(std::int64_t round, std::size_t num_configurations) {
  std::vector<std::size_t> order(num_configurations);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (round <= 1) return order;
  const engine::RandomStream random{.seed = engine::fnv1a("order of a round"),
                                    .stream = static_cast<std::uint64_t>(round)};
  for (std::size_t i = num_configurations; i-- > 1;) {
    std::swap(order[i], order[random.bits(i) % (i + 1)]);
  }
  return order;
}

Speeds compare_speeds(const std::vector<std::vector<double>>& speeds) {
  Speeds result;
  const std::size_t num_all = speeds.size();
  result.fastest_ratio.resize(num_all);
  result.faster.assign(num_all, std::vector<bool>(num_all, false));
  std::vector<std::size_t> known;
  for (std::size_t i = 0; i < num_all; ++i) {
    if (speeds[i].empty()) continue;
    known.push_back(i);
    const std::int64_t num_rounds = std::ssize(speeds[i]);
    result.num_rounds = known.size() == 1 ? num_rounds : std::min(result.num_rounds, num_rounds);
  }
  if (known.size() < 2) return result;
  result.rounds_needed = rounds_needed(known.size());
  if (result.num_rounds < result.rounds_needed) return result;
  const auto of_rounds = [&](std::size_t i) {
    return std::span(speeds[i]).first(static_cast<std::size_t>(result.num_rounds));
  };
  const auto ratio = [&](std::size_t a, std::size_t b) {
    return *ratio_interval(of_rounds(a), of_rounds(b), known.size());
  };
  std::vector<double> medians(num_all, 0);
  for (const std::size_t i : known) {
    const std::span<const double> values = of_rounds(i);
    medians[i] = median_of({values.begin(), values.end()});
  }
  for (const std::size_t a : known) {
    for (const std::size_t b : known) result.faster[a][b] = a != b && ratio(a, b).low > 1;
  }
  const std::size_t fastest =
      *std::ranges::max_element(known, {}, [&](auto i) { return medians[i]; });
  result.fastest = fastest;
  for (const std::size_t i : known) {
    if (i == fastest) continue;
    result.fastest_ratio[i] = ratio(fastest, i);
    if (!result.faster[fastest][i]) result.as_fast.push_back(i);
  }
  std::ranges::stable_sort(result.as_fast, std::ranges::greater{},
                           [&](std::size_t i) { return medians[i]; });
  return result;
}

}  // namespace tessera::tools

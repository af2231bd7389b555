#include "tools/trace/overlap.h"

#include <algorithm>

namespace tessera::tools {
namespace {

double to_ms(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

void add(CommTimes& sum, const CommTimes& times, double weight) {
  sum.comm_ms += times.comm_ms * weight;
  sum.hidden_ms += times.hidden_ms * weight;
  sum.exposed_ms += times.exposed_ms * weight;
}

JsonRecord record_of(const CommTimes& times) {
  return JsonRecord()
      .add("comm_ms", times.comm_ms)
      .add("hidden_ms", times.hidden_ms)
      .add("exposed_ms", times.exposed_ms);
}

}  // namespace

std::vector<Interval> merge(std::vector<Interval> intervals) {
  std::erase_if(intervals, [](const Interval& i) { return i.end_ns <= i.begin_ns; });
  std::ranges::sort(intervals, {}, &Interval::begin_ns);
  std::vector<Interval> merged;
  for (const Interval& i : intervals) {
    if (merged.empty() || merged.back().end_ns < i.begin_ns) {
      merged.push_back(i);
    } else {
      merged.back().end_ns = std::max(merged.back().end_ns, i.end_ns);
    }
  }
  return merged;
}

std::int64_t length_ns(const std::vector<Interval>& merged) {
  std::int64_t sum = 0;
  for (const Interval& i : merged) sum += i.end_ns - i.begin_ns;
  return sum;
}

std::int64_t common_ns(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::int64_t sum = 0;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    const std::int64_t begin = std::max(x->begin_ns, y->begin_ns);
    const std::int64_t end = std::min(x->end_ns, y->end_ns);
    sum += std::max<std::int64_t>(end - begin, 0);
    x->end_ns < y->end_ns ? ++x : ++y;
  }
  return sum;
}

CommTimes comm_times(const std::vector<Interval>& comm, const std::vector<Interval>& compute) {
  const std::vector<Interval> sent = merge(comm);
  const std::int64_t all = length_ns(sent);
  const std::int64_t hidden = common_ns(sent, merge(compute));
  return {.comm_ms = to_ms(all), .hidden_ms = to_ms(hidden), .exposed_ms = to_ms(all - hidden)};
}

JsonRecord record_of(const Overlap& overlap) {
  JsonRecord kinds;
  for (const auto& [kind, times] : overlap.kinds) {
    kinds.add_literal(kind, record_of(times).text());
  }
  return JsonRecord()
      .add("compute_ms", overlap.compute_ms)
      .add_all(record_of(overlap.comm))
      .add_literal("kinds", kinds.text());
}

Overlap mean_of(const std::vector<Overlap>& overlaps) {
  Overlap mean;
  const double weight = 1 / std::max(static_cast<double>(overlaps.size()), 1.0);
  for (const Overlap& o : overlaps) {
    mean.compute_ms += o.compute_ms * weight;
    add(mean.comm, o.comm, weight);
    for (const auto& [kind, times] : o.kinds) add(mean.kinds[kind], times, weight);
  }
  return mean;
}

}  // namespace tessera::tools

// What gathering ahead is worth, on links whose speed is stated.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench/parts.h"
#include "tools/bench/training/link.h"
#include "tools/bench/training/training.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using shard::BackwardPrefetch;

constexpr std::chrono::microseconds kLatency{50};

struct Way {
  const char* name;
  int prefetch;
  BackwardPrefetch backward;
};
constexpr Way kWays[] = {{"off", 0, BackwardPrefetch::kPre},
                         {"post-backward", 1, BackwardPrefetch::kPost},
                         {"pre-backward", 1, BackwardPrefetch::kPre},
                         {"pre-backward, 2 ahead", 2, BackwardPrefetch::kPre}};

TrainingRow row_of(TrainingRow row, const Way& way) {
  row.prefetch = way.prefetch;
  row.backward_prefetch = way.backward;
  return row;
}

// Before the first gathers are done nothing can be computed, and after the last backward there is
// nothing to compute meanwhile.
bool is_edge(std::string_view label) {
  return label == "root forward" || label == "h.0 forward" || label == "root gradient" ||
         label == "h.0 gradient" || label == "norm";
}

struct Result {
  TrainingTimes times;
  double nbytes = 0, edge_nbytes = 0;  // that a rank sends in a step that counts
};

// `nbytes_per_s`: 0: no link.
Result run(const TrainingRow& row, double nbytes_per_s, std::int64_t num_steps) {
  std::vector<std::unique_ptr<Link>> links;
  for (int r = 0; r < row.ranks; ++r)
    links.push_back(std::make_unique<Link>(nbytes_per_s, kLatency));
  const auto wrap = [&](comm::ProcessGroup& world) {
    return std::make_unique<LinkedGroup>(world, *links[static_cast<std::size_t>(world.rank())],
                                         is_edge);
  };
  // The first of these steps finds gathered what the last one gathers for one that does not come.
  std::vector<double> nbytes, edge_nbytes;
  const auto count = [&, &link = *links.front()] {
    nbytes.push_back(link.nbytes());
    edge_nbytes.push_back(link.edge_nbytes());
  };
  Result result{.times = run_training(row, num_steps, nullptr, wrap, count)};
  const auto steps = static_cast<double>(num_steps);
  result.nbytes = (nbytes.at(1) - nbytes.at(0)) / steps;
  result.edge_nbytes = (edge_nbytes.at(1) - edge_nbytes.at(0)) / steps;
  return result;
}

}  // namespace

void bench_prefetch(const TrainingRow& base, const BenchConfig& config, BenchReport& report) {
  const std::string name = base.name();
  if (!config.wants("prefetch " + name)) return;
  // What a step computes, and what it sends.
  const Result alone = run(row_of(base, kWays[2]), 0, config.steps);
  const double skew_ms = median(alone.times.exposed_comm_ms);  // ranks wait for each other
  const double compute_ms = median(alone.times.step_ms) - skew_ms;
  report.begin_table(
      "prefetch",
      fmt::format(
          "{}, {} rounds of {} steps in turn; {:.1f} MB sent by a rank in a step, {:.0f} ms "
          "of computing, {:.1f} ms of waiting without a link; latency {} us. link: sending alone; "
          "hidden: of that, but for the first gathers and the last reductions, and without the "
          "waiting that there is without a link; saved: to off",
          name, config.rounds, config.steps, alone.nbytes * 1e-6, compute_ms, skew_ms,
          kLatency.count()),
      {"prefetch", "gb_per_s", "link_ms", "ms", "min_ms", "max_ms", "exposed_ms", "hidden_pct",
       "saved_pct", "peak_mib", "more_memory_pct"});
  for (const double share : {1.0, 0.5}) {  // of computing that sending takes
    const double nbytes_per_s = alone.nbytes / (share * compute_ms) * 1e3;
    std::vector<std::vector<double>> step_ms(std::size(kWays)), exposed_ms(std::size(kWays));
    std::vector<Result> last(std::size(kWays));
    for (std::int64_t round = 0; round < config.rounds; ++round) {
      for (std::size_t w = 0; w < std::size(kWays); ++w) {
        last[w] = run(row_of(base, kWays[w]), nbytes_per_s, config.steps);
        const TrainingTimes& t = last[w].times;
        step_ms[w].insert(step_ms[w].end(), t.step_ms.begin(), t.step_ms.end());
        exposed_ms[w].insert(exposed_ms[w].end(), t.exposed_comm_ms.begin(),
                             t.exposed_comm_ms.end());
      }
    }
    const double off_ms = median(step_ms[0]);
    const auto peak = [&](std::size_t w) {
      return static_cast<double>(last[w].times.memory.peak_total_nbytes);
    };
    for (std::size_t w = 0; w < std::size(kWays); ++w) {
      const Measurement t = Measurement::of(step_ms[w]);
      const double exposed = median(exposed_ms[w]);
      const double link_ms = last[w].nbytes / nbytes_per_s * 1e3;
      const double edge_ms = last[w].edge_nbytes / nbytes_per_s * 1e3;
      const double shown = std::max(0.0, exposed - skew_ms - edge_ms);
      report.row({kWays[w].name, Cell(nbytes_per_s * 1e-9, 2), link_ms, t.median_ms, t.min_ms,
                  t.max_ms, exposed, 100 * (1 - shown / (link_ms - edge_ms)),
                  100 * (1 - t.median_ms / off_ms), peak(w) / 0x1p20,
                  100 * (peak(w) / peak(0) - 1)});
    }
  }
}

}  // namespace tessera::tools

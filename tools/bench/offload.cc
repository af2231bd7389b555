// What offload saves and costs, fraction by fraction.
#include <fmt/format.h>

#include <cstddef>
#include <vector>

#include "tools/bench/parts.h"
#include "tools/bench/training/training.h"
#include "tools/rates/timing.h"

namespace tessera::tools {

void bench_offload(const TrainingRow& base, const BenchConfig& config, BenchReport& report) {
  if (!config.wants("offload " + base.name())) return;
  std::vector<TrainingRow> rows = {base};
  const auto add = [&](shard::OffloadOptions offload, bool updates_in_backward = false) {
    rows.push_back(base);
    rows.back().offload = offload;
    rows.back().updates_in_backward = updates_in_backward;
  };
  const bool moves =
      shard::can_offload_parameters(shard::Placement::preset(base.strategy), {.param = base.param});
  for (const double f : {0.5, 1.0}) {
    if (moves) add({.parameters = f});
    add({.gradients = f});
    add({.optimizer = f});
  }
  const double parameters = moves ? 1 : 0;
  for (const double f : {0.25, 0.5, 0.75, 1.0}) {
    add({.parameters = f * parameters, .gradients = f, .optimizer = f});
  }
  add({.parameters = parameters, .gradients = 1, .optimizer = 1}, true);

  std::vector<std::vector<double>> step_ms(rows.size());
  std::vector<TrainingTimes> last(rows.size());
  for (std::int64_t round = 0; round < config.rounds; ++round) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      last[i] = run_training(rows[i], config.steps);
      step_ms[i].insert(step_ms[i].end(), last[i].step_ms.begin(), last[i].step_ms.end());
    }
  }
  report.begin_table(
      "offload",
      fmt::format("{}, {} rounds of {} steps in turn; fractions that lie on the host; peaks of one "
                  "rank; saved and slower: than without",
                  base.name(), config.rounds, config.steps),
      {"parameters", "gradients", "optimizer", "updates", "ms", "min_ms", "max_ms", "slower_pct",
       "device_mib", "saved_pct", "host_mib"});
  const double without_ms = median(step_ms[0]);
  const auto mib = [](const engine::MemoryStats& memory) {
    return static_cast<double>(memory.peak_total_nbytes) / 0x1p20;
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const shard::OffloadOptions& offload = rows[i].offload;
    const Measurement t = Measurement::of(step_ms[i]);
    report.row({Cell(offload.parameters, 2), Cell(offload.gradients, 2), Cell(offload.optimizer, 2),
                rows[i].updates_in_backward ? "in backward" : "after it", t.median_ms, t.min_ms,
                t.max_ms, 100 * (t.median_ms / without_ms - 1), mib(last[i].memory),
                100 * (1 - mib(last[i].memory) / mib(last[0].memory)), mib(last[i].host_memory)});
  }
}

}  // namespace tessera::tools

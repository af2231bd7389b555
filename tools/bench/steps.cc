#include <fmt/format.h>

#include <vector>

#include "tools/bench/parts.h"
#include "tools/bench/training/peer.h"
#include "tools/bench/training/training.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

// The median of several rounds' medians.
class Rounds {
 public:
  void add(const Measurement& m) {
    medians_.push_back(m.median_ms);
    extremes_.insert(extremes_.end(), {m.min_ms, m.max_ms});
  }
  Measurement result() const {
    const Measurement all = Measurement::of(extremes_);
    return {median(medians_), all.min_ms, all.max_ms};
  }

 private:
  std::vector<double> medians_, extremes_;
};

}  // namespace

void bench_steps(const std::vector<TrainingRow>& rows, const BenchConfig& config,
                 BenchReport& report) {
  report.begin_table(
      "steps",
      fmt::format(
          "Training steps: {} rounds in turn of {} steps each. exposed: compute waiting for "
          "collectives; torch: PyTorch; ratio: PyTorch's median to ours",
          config.rounds, config.steps),
      {"training", "ms", "min_ms", "max_ms", "exposed_ms", "torch_ms", "torch_min_ms",
       "torch_max_ms", "ratio"});
  if (config.python.empty()) {
    report.note("PyTorch is left out: bench.python names no interpreter");
  }
  for (const TrainingRow& row : rows) {
    if (!config.wants(row.name())) continue;
    Rounds ours, peers;
    std::vector<double> exposed;
    for (std::int64_t round = 0; round < config.rounds; ++round) {
      const TrainingTimes times = run_training(row, config.steps);
      ours.add(Measurement::of(times.step_ms));
      exposed.push_back(median(times.exposed_comm_ms));
      if (!config.python.empty()) {
        peers.add(run_peer({config.python, config.peer}, row, config.steps));
      }
    }
    const Measurement mine = ours.result(), peer = peers.result();
    report.row({row.name(), mine.median_ms, mine.min_ms, mine.max_ms, median(exposed),
                peer.median_ms, peer.min_ms, peer.max_ms,
                Cell(peer.median_ms / mine.median_ms, 2)});
  }
}

}  // namespace tessera::tools

#include <fmt/format.h>
#include <malloc.h>

#include <fstream>
#include <limits>
#include <string>
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

// The most that this process has held since the peak was forgotten; NaN where the system does not
// tell.
double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  }
  return std::numeric_limits<double>::quiet_NaN();
}
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

}  // namespace

void bench_steps(const std::vector<TrainingRow>& rows, const BenchConfig& config,
                 BenchReport& report) {
  report.begin_table(
      "steps",
      fmt::format(
          "Training steps: {} rounds in turn of {} steps each. exposed: compute waiting for "
          "collectives; torch: PyTorch; ratio: PyTorch's median to ours; mib: the most that "
          "a rank holds in these steps, with its programs and libraries; ours: of the process, a "
          "rank's part",
          config.rounds, config.steps),
      {"training", "ms", "min_ms", "max_ms", "exposed_ms", "torch_ms", "torch_min_ms",
       "torch_max_ms", "ratio", "mib", "torch_mib"});
  if (config.python.empty()) {
    report.note("PyTorch is left out: bench.python names no interpreter");
  }
  for (const TrainingRow& row : rows) {
    if (!config.wants(row.name())) continue;
    Rounds ours, peers;
    std::vector<double> exposed, mib, peer_mib;
    for (std::int64_t round = 0; round < config.rounds; ++round) {
      malloc_trim(0);  // what the row before held
      int num_ends = 0;
      const TrainingTimes times = run_training(row, config.steps, nullptr, nullptr, [&] {
        num_ends++ == 0 ? forget_peak() : mib.push_back(peak_mib() / row.ranks);
      });
      ours.add(Measurement::of(times.step_ms));
      exposed.push_back(median(times.exposed_comm_ms));
      if (!config.python.empty()) {
        const PeerRun run = run_peer({config.python, config.peer}, row, config.steps);
        peers.add(run.step_ms);
        peer_mib.push_back(run.peak_mib);
      }
    }
    const Measurement mine = ours.result(), peer = peers.result();
    report.row({row.name(), mine.median_ms, mine.min_ms, mine.max_ms, median(exposed),
                peer.median_ms, peer.min_ms, peer.max_ms, Cell(peer.median_ms / mine.median_ms, 2),
                Cell(median(mib), 0), Cell(median(peer_mib), 0)});
  }
}

}  // namespace tessera::tools

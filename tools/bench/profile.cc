#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "tools/bench/parts.h"
#include "tools/bench/training/launches.h"
#include "tools/bench/training/training.h"
#include "tools/rates/peak.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

bool is_matrix_product(const KernelTimes& kernel) {
  const auto starts = [&](const char* prefix) { return kernel.name.starts_with(prefix); };
  return (starts("linear") || starts("attention")) && !kernel.name.ends_with("bias");
}

void profile(const TrainingRow& row, const BenchConfig& config, BenchReport& report) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  // What the floor is made of.
  const double gflop_per_s = product_gflop_per_s(row.param);
  LaunchLog log;
  const TrainingTimes times = run_training(row, config.steps, &log);
  const auto steps = static_cast<double>(config.steps);
  // Means, so that the parts add up to the whole.
  const double step_ms = mean(times.step_ms), blocked_ms = mean(times.exposed_comm_ms);

  std::vector<KernelTimes> kernels = log.kernels();
  std::sort(kernels.begin(), kernels.end(), [](const KernelTimes& a, const KernelTimes& b) {
    return a.stream != b.stream ? a.stream > b.stream : a.total_ms() > b.total_ms();
  });
  report.begin_table(
      "profile",
      fmt::format("A step of {} by kernel, rank 0, mean of {} steps; best: each launch's fastest. "
                  "The streams gather and reduce run while compute does, and their times include "
                  "waiting for peers",
                  row.name(), config.steps),
      {"kernel", "stream", "calls", "ms", "best_ms", "share_pct", "gflop_per_s", "gb_per_s"});
  double compute_ms = 0, product_flops = 0;
  for (const KernelTimes& k : kernels) {
    const double ms = k.total_ms() / steps;
    const bool is_compute = k.stream == "compute";
    if (is_compute) compute_ms += ms;
    if (is_matrix_product(k)) product_flops += k.flops / steps;
    report.row({k.name, k.stream, Cell(static_cast<double>(k.ms.size()) / steps), Cell(ms, 2),
                Cell(k.best_step_ms(config.steps), 2), is_compute ? 100 * ms / step_ms : kNone,
                k.flops / k.total_ms() * 1e-6, k.nbytes / k.total_ms() * 1e-6});
  }
  const auto part = [&](const char* name, double ms, double best_ms) {
    report.row({name, "", kNone, Cell(ms, 2), Cell(best_ms, 2), 100 * ms / step_ms, kNone, kNone});
  };
  part("waiting for collectives", blocked_ms, kNone);
  part("rest: gradient norm, tape, host", step_ms - compute_ms - blocked_ms, kNone);
  part("whole step", step_ms, Measurement::of(times.step_ms).min_ms);
  const double floor_ms = product_flops * 1e-6 / gflop_per_s;
  report.note(fmt::format(
      "forward {:.1f}, backward {:.1f}, last reductions and norm {:.1f}, optimizer "
      "{:.1f} ms; floor: "
      "{:.2f} GFLOP of products at {:.1f} GFLOP/s = {:.1f} ms, {}",
      mean(times.forward_ms), mean(times.backward_ms), mean(times.finish_ms),
      mean(times.optimizer_ms), product_flops * 1e-9, gflop_per_s, floor_ms,
      floor_ms > step_ms ? "longer than the step: that rate was measured while other "
                           "programs ran"
                         : fmt::format("{:.0f} % of the step", 100 * floor_ms / step_ms)));
}

}  // namespace

void bench_profile(const BenchConfig& config, BenchReport& report) {
  for (const auto* rows : {&training_rows(), &preset_rows()}) {
    for (const TrainingRow& row : *rows) {
      if (config.wants(row.name())) profile(row, config, report);
    }
  }
}

}  // namespace tessera::tools

#include "tools/report/advice.h"

#include <fmt/format.h>

#include "shard/placement.h"

namespace tessera::tools {
namespace {

// What is worth changing, as shares of a step.
constexpr double kMuchExposed = 0.10, kMuchOptimizer = 0.20, kMuchData = 0.05;
// Of the 90th to the 10th percentile of step times.
constexpr double kWideSpread = 1.5;
constexpr std::int64_t kMinSteps = 5;
constexpr std::size_t kMost = 3;

// For ranks whose threads do not fit.
std::string fewer_threads(const TrainConfig& config, const RunPlace& place) {
  const auto threads = static_cast<int>(config.cpu.threads_per_rank);
  const std::string found = fmt::format(
      "{} rank{}{} share{} {} core{}, so some always wait; try ", place.num_sharing,
      place.num_sharing == 1 ? "" : "s", threads > 1 ? fmt::format(" of {} threads", threads) : "",
      place.num_sharing == 1 ? "s" : "", place.num_cores, place.num_cores == 1 ? "" : "s");
  if (threads > 1) {
    return fmt::format("{}--cpu.threads_per_rank={}", found,
                       std::max(place.num_cores / place.num_sharing, 1));
  }
  return found + fewer_ranks(config, place.num_ranks,
                             place.num_ranks * place.num_cores / place.num_sharing,
                             place.num_processes);
}

// Whether some rank waits for a core.
bool is_crowded(const TrainConfig& config, const RunPlace& place) {
  return place.num_gpus == 0 && place.num_sharing * config.cpu.threads_per_rank > place.num_cores;
}

// Whose ranks do not wait for cores.
std::string less_exposed(double percent, const TrainConfig& config, const RunPlace& place) {
  const ParallelConfig& p = config.parallel;
  const bool gathers = p.preset().parameters != shard::Place::kWhole &&
                       config.fsdp_options(place.num_ranks).placement.shard_ranks > 1;
  const std::string found = fmt::format("exposed communication is {:.0f} % of a step", percent);
  // NCCL's own order of sums may depend on what is on its way at a time.
  const bool keeps_bits = place.num_gpus == 0 || p.canonical;
  const std::string one_more = fmt::format(  // which a budget would take away again
      "{}({}memory of one unit more)",
      config.memory_budget.empty() ? "" : "and a larger --memory_budget ",
      keeps_bits ? "same bits, " : "");
  if (gathers && p.prefetch == 0) {
    return fmt::format("{}: no unit is gathered ahead; try --parallel.prefetch=1 {}", found,
                       one_more);
  }
  if (p.reductions_in_flight == 0) {
    return fmt::format(
        "{}: backward waits for each reduction; try --parallel.reductions_in_flight=1 {}", found,
        one_more);
  }
  if (config.train.accum > 1 && config.train.accum_comm == AccumComm::kEvery) {
    return found +
           ": every micro-step reduces; try --train.accum_comm=last (whole gradients in memory, "
           "sums in another order)";
  }
  if (gathers && p.prefetch == 1) return found + ": try --parallel.prefetch=2 " + one_more;
  return found + ": try a larger --train.batch, which sends as much for more work";
}

}  // namespace

std::string fewer_ranks(const TrainConfig& config, int num_ranks, int most, int num_processes) {
  int ranks = std::clamp(most, 1, num_ranks);
  while (num_ranks % ranks != 0) --ranks;  // so that a step has as many samples
  const bool keeps_bits =
      config.comm.text().empty() && config.train.accum_comm == AccumComm::kEvery;
  const auto processes = [](int n) {
    return fmt::format("{} process{} with", n, n == 1 ? "" : "es");
  };
  const bool has_threads = num_ranks > num_processes;  // in each process
  const std::string count = num_processes == 1 ? fmt::format("--parallel.ranks={}", ranks)
                            : !has_threads     ? processes(ranks)
                            : ranks % num_processes == 0
                                ? fmt::format("--parallel.threads={}", ranks / num_processes)
                                : processes(ranks) + " --parallel.threads=1";
  return fmt::format("{} --train.accum={} (same {})", count,
                     config.train.accum * (num_ranks / ranks),
                     keeps_bits ? "bits" : "samples a step");
}

std::vector<std::string> advice(const RunSummary::Figures& f, const TrainConfig& config,
                                const RunPlace& place) {
  std::vector<std::string> all;
  if (f.num_steps < kMinSteps) return all;
  const double exposed = f.share("exposed comm"), optimizer = f.share("optimizer");
  const bool is_exposed = place.num_ranks > 1 && exposed > kMuchExposed;
  const bool varies =
      place.num_gpus == 0 && f.step_ms.p10 > 0 && f.step_ms.p90 > kWideSpread * f.step_ms.p10;
  const std::string spread =
      varies ? fmt::format("steps vary by a factor of {:.1f}", f.step_ms.p90 / f.step_ms.p10) : "";
  const bool crowded = is_crowded(config, place);
  if (crowded && (is_exposed || varies)) {  // one cause, so one line
    const std::string exposure =
        is_exposed ? fmt::format("exposed communication is {:.0f} % of a step", 100 * exposed) : "";
    all.push_back(fmt::format("{}{}{}: {}", exposure, is_exposed && varies ? ", and " : "", spread,
                              fewer_threads(config, place)));
  } else if (is_exposed) {
    all.push_back(less_exposed(100 * exposed, config, place));
  }
  if (f.share("data") > kMuchData) {
    all.push_back(
        fmt::format("waiting for data takes {:.0f} % of a step: leave a core to the loader, which "
                    "is a thread of each rank, or put the data on a faster disk",
                    100 * f.share("data")));
  }
  if (optimizer > kMuchOptimizer) {
    all.push_back(fmt::format(
        "the optimizer takes {:.0f} % of a step: try a larger --train.batch or --train.accum, for "
        "fewer updates of as many samples",
        100 * optimizer));
  }
  if (varies && !crowded) {
    all.push_back(spread + (config.cpu.pin
                                ? ": other programs use the cores of this machine"
                                : ": try --cpu.pin=true (cores of its own for each rank)"));
  }
  if (all.size() > kMost) all.resize(kMost);
  return all;
}

}  // namespace tessera::tools

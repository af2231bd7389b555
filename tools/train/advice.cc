#include "tools/train/advice.h"

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
  const std::string found =
      fmt::format("{} ranks{} share {} cores, so some always wait; try ", place.num_ranks,
                  threads > 1 ? fmt::format(" of {} threads", threads) : "", place.num_cores);
  if (threads > 1) {
    return fmt::format("{}--cpu.threads_per_rank={}", found,
                       std::max(place.num_cores / place.num_ranks, 1));
  }
  int ranks = std::clamp(place.num_cores, 1, place.num_ranks);
  while (place.num_ranks % ranks != 0) --ranks;  // so that a step has as many samples
  return fmt::format("{}--parallel.ranks={} with --train.accum={} times as much", found, ranks,
                     place.num_ranks / ranks);
}

std::string less_exposed(double percent, const TrainConfig& config, const RunPlace& place) {
  const ParallelConfig& p = config.parallel;
  const bool gathers = shard::Placement::preset(p.strategy).parameters != shard::Place::kWhole &&
                       config.fsdp_options(place.num_ranks).shard_ranks > 1;
  const std::string found = fmt::format("exposed communication is {:.0f} % of a step", percent);
  if (place.num_gpus == 0 && place.num_ranks * config.cpu.threads_per_rank > place.num_cores) {
    return found + ": " + fewer_threads(config, place);
  }
  if (gathers && p.prefetch == 0) {
    return found + ": no unit is gathered ahead; try --parallel.prefetch=1, for one slot more";
  }
  if (p.reductions_in_flight == 0) {
    return found + ": backward waits for each reduction; try --parallel.reductions_in_flight=1";
  }
  if (config.train.accum > 1 && config.train.accum_comm == AccumComm::kEvery) {
    return found +
           ": every micro-step reduces; try --train.accum_comm=last, which keeps whole "
           "gradients and adds in another order";
  }
  if (gathers && p.prefetch == 1) {
    return found + ": try --parallel.prefetch=2, for one slot more";
  }
  return found + ": try a larger --train.batch or --train.accum, which send as much for more work";
}

}  // namespace

std::vector<std::string> advice(const RunSummary::Figures& f, const TrainConfig& config,
                                const RunPlace& place) {
  std::vector<std::string> all;
  if (f.num_steps < kMinSteps) return all;
  const double exposed = f.share("exposed comm"), optimizer = f.share("optimizer");
  if (place.num_ranks > 1 && exposed > kMuchExposed) {
    all.push_back(less_exposed(100 * exposed, config, place));
  }
  if (f.share("data") > kMuchData) {
    all.push_back(
        fmt::format("the loop waits for the loader for {:.0f} % of a step: it fills one batch "
                    "ahead in a thread "
                    "of its own for each rank; leave it a core, or data on a faster disk",
                    100 * f.share("data")));
  }
  if (optimizer > kMuchOptimizer) {
    all.push_back(fmt::format(
        "the optimizer takes {:.0f} % of a step: a larger --train.batch or --train.accum updates "
        "less often for the same work",
        100 * optimizer));
  }
  if (place.num_gpus == 0 && f.step_ms.p10 > 0 && f.step_ms.p90 > kWideSpread * f.step_ms.p10) {
    const bool fits = place.num_ranks * config.cpu.threads_per_rank <= place.num_cores;
    all.push_back(fmt::format("steps vary by a factor of {:.1f}: {}", f.step_ms.p90 / f.step_ms.p10,
                              fits && !config.cpu.pin
                                  ? "try --cpu.pin=true, which gives each rank cores of its own"
                                  : "something else uses this machine's cores"));
  }
  if (all.size() > kMost) all.resize(kMost);
  return all;
}

}  // namespace tessera::tools

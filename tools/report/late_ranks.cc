#include "tools/report/late_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <utility>

#include "engine/io/host.h"

namespace tessera::tools {
namespace {

using comm::FlightWaits;

FlightWaits since(const FlightWaits& begin, FlightWaits now) {
  now.num_calls -= begin.num_calls;
  for (std::size_t r = 0; r < begin.by_rank.size(); ++r) {
    now.by_rank[r].num_calls -= begin.by_rank[r].num_calls;
    now.by_rank[r].waited_ns -= begin.by_rank[r].waited_ns;
  }
  return now;
}

double ms(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

// What text() says.
struct Told {
  std::string host;
  FlightWaits waits;
};
Told told_by(const std::string& text) {
  std::istringstream in(text);
  Told told;
  in >> told.host >> told.waits.num_calls;
  for (FlightWaits::Wait wait; in >> wait.num_calls >> wait.waited_ns;) {
    told.waits.by_rank.push_back(wait);
  }
  return told;
}

}  // namespace

LateRanks::LateRanks(std::shared_ptr<const comm::FlightRecorder> flight)
    : flight_(std::move(flight)), begin_(flight_->waits()), last_(begin_) {}

JsonRecord LateRanks::step() {
  ++num_steps_;
  FlightWaits now = flight_->waits();
  const FlightWaits step = since(last_, now);
  last_ = std::move(now);
  const auto latest = std::ranges::max_element(step.by_rank, {}, &FlightWaits::Wait::waited_ns);
  if (latest == step.by_rank.end() || latest->waited_ns == 0) return {};
  return JsonRecord()
      .add("late_rank", latest - step.by_rank.begin())
      .add("late_ms", ms(latest->waited_ns));
}

std::string LateRanks::text() const {
  const FlightWaits waits = since(begin_, flight_->waits());
  std::string text = fmt::format("{} {}", engine::host_name(), waits.num_calls);
  for (const auto& wait : waits.by_rank) {
    text += fmt::format(" {} {}", wait.num_calls, wait.waited_ns);
  }
  return text;
}

std::string LateRank::str() const {
  return fmt::format("rank {} waited for rank {} on {} in {:.0f} % of its calls, {:.1f} ms a step",
                     waiting, rank, host, 100 * share, ms_a_step);
}

JsonRecord LateRank::record() const {
  return JsonRecord().add("late_rank", rank).add("late_share", share).add("late_ms", ms_a_step);
}

std::optional<LateRank> find_late_rank(std::span<const std::string> texts, std::int64_t num_steps,
                                       double step_ms) {
  // Two ranks that are as fast wait for each other in half of the calls each.
  constexpr double kMost = 0.6, kMuch = 0.05;
  std::optional<LateRank> late;
  for (std::size_t waiting = 0; waiting < texts.size(); ++waiting) {
    const FlightWaits waits = told_by(texts[waiting]).waits;
    for (std::size_t r = 0; r < std::min(waits.by_rank.size(), texts.size()); ++r) {
      const double ms_a_step = ms(waits.by_rank[r].waited_ns) / static_cast<double>(num_steps);
      const double share = static_cast<double>(waits.by_rank[r].num_calls) /
                           static_cast<double>(std::max<std::int64_t>(waits.num_calls, 1));
      // Ranks of one process say the same, of each other.
      if (r == waiting || share < kMost || ms_a_step < kMuch * step_ms) continue;
      if (late && late->ms_a_step >= ms_a_step) continue;
      late = {.rank = static_cast<int>(r),
              .host = told_by(texts[r]).host,
              .waiting = static_cast<int>(waiting),
              .share = share,
              .ms_a_step = ms_a_step};
    }
  }
  return late;
}

}  // namespace tessera::tools

#include "tools/programs/run/audit.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

Audit::Audit(TrainPlan plan, const PlanTarget& target, std::int64_t val_every)
    : plan_(std::move(plan)), rank_(target.rank), on_gpus_(target.on_gpus), val_every_(val_every) {}

std::vector<Audit::Row> Audit::rows_of(const StepRecord& step) const {
  const StepRecord& planned =
      step.replayed.empty() ? planned_step(plan_, step.step, start_) : *plan_.repeated;
  std::vector<Row> rows = {
      {"bytes sent", planned.traffic.bytes_sent, step.traffic.bytes_sent},
      {"collectives", planned.traffic.num_collectives, step.traffic.num_collectives}};
  // `loose`: how rows with workspace are compared.
  const auto add = [&](const std::string& where, const engine::MemoryStats& p,
                       const engine::MemoryStats& m, const Row& loose) {
    const auto add_row = [&](const std::string& what, std::int64_t planned_nbytes,
                             std::int64_t nbytes, bool has_workspace) {
      Row row = has_workspace ? loose : Row();
      row.what = where + what;
      row.planned = planned_nbytes;
      row.measured = nbytes;
      rows.push_back(std::move(row));
    };
    for (int i = 0; i < engine::kNumCategories; ++i) {
      const auto category = static_cast<engine::Category>(i);
      const auto at = static_cast<std::size_t>(i);
      add_row(std::string(name_of(category)), p.peak_nbytes[at], m.peak_nbytes[at],
              category == engine::Category::kWorkspace);
    }
    add_row("all memory", p.peak_total_nbytes, m.peak_total_nbytes, true);
  };
  constexpr std::int64_t kNormsOnTheirWay = 64;  // bytes
  add("", planned.step_memory, step.step_memory, {.is_bound = on_gpus_});
  add("host: ", planned.step_host_memory, step.step_host_memory,
      {.slack = on_gpus_ ? kNormsOnTheirWay : 0});
  return rows;
}

void Audit::add(const StepRecord& step) {
  const bool is_after_validation =
      val_every_ > 0 && step.step > start_ + 1 && (step.step - 1) % val_every_ == 0;
  // What is not updated is not gathered again, there or ahead of the next step.
  const bool is_skipped = !step.skipped.empty();
  const bool is_after_skip = std::exchange(was_skipped_, is_skipped);
  // Of a step that was made again the plan knows what follows another one, and comes to the same.
  const bool is_unplanned =
      !step.replayed.empty() && (step.step == start_ + 1 || step.replayed != kReplayedEqual);
  if (is_after_validation || is_skipped || is_after_skip || is_unplanned || first_wrong_ > 0) {
    return;
  }
  rows_ = rows_of(step);
  ++num_steps_;
  if (!std::ranges::all_of(rows_, &Row::is_as_planned)) first_wrong_ = step.step;
}

std::vector<std::string> Audit::lines() const {
  std::vector<std::string> lines = {fmt::format(
      "{:<26}{:>18}{:>18}", fmt::format("audit of a step, rank {}", rank_), "planned", "measured")};
  for (const Row& row : rows_) {
    if (row.planned == 0 && row.measured == 0) continue;
    lines.push_back(fmt::format("  {:<24}{:>18}{:>18}  {}", row.what,
                                (row.is_bound ? "<= " : "") + engine::with_commas(row.planned),
                                engine::with_commas(row.measured),
                                row.is_as_planned() ? "" : "DIFFERS"));
    while (lines.back().ends_with(' ')) lines.back().pop_back();
  }
  lines.push_back(num_steps_ == 0    ? "no step was compared with the plan"
                  : first_wrong_ > 0 ? fmt::format("step {} is not as planned", first_wrong_)
                  : num_steps_ == 1  ? "1 step is as planned"
                                     : fmt::format("{} steps are as planned", num_steps_));
  return lines;
}

std::string Audit::gathers_line() const {
  constexpr std::size_t kMostShown = 6;
  // Those of losses, norms and compressed gradients have other labels.
  const auto is_of_unit = [](const PlannedCollective& c) {
    return c.name == "all_gather" &&
           std::ranges::any_of(std::array{" forward", " backward", " update"},
                               [&](const char* why) { return c.label.ends_with(why); });
  };
  bool has_gathers = false;
  std::map<std::string, double> waits_ms;  // of all micro-steps
  for (const PlannedCollective& c : plan_.collectives) {
    if (!is_of_unit(c)) continue;
    has_gathers = true;
    if (c.is_exposed()) waits_ms[c.label] += c.exposed_ms;
  }
  if (!has_gathers) return "";
  if (waits_ms.empty()) return "all gathers are hidden in the plan, at --rates.*";
  std::vector<std::pair<std::string, double>> waits(waits_ms.begin(), waits_ms.end());
  std::ranges::stable_sort(waits, std::ranges::greater(), &std::pair<std::string, double>::second);
  std::vector<std::string> shown;
  double rest_ms = 0;
  for (const auto& [label, ms] : waits) {
    if (shown.size() < kMostShown) {
      shown.push_back(fmt::format("{} {:.3f} ms", label, ms));
    } else {
      rest_ms += ms;
    }
  }
  if (waits.size() > shown.size()) {
    shown.push_back(fmt::format("{} more {:.3f} ms", waits.size() - shown.size(), rest_ms));
  }
  return fmt::format("gathers not hidden in the plan, at --rates.*: {}", fmt::join(shown, ", "));
}

void Audit::check() const {
  if (first_wrong_ == 0) return;
  engine::fail("[audit] expected what was planned, got:\n  {} (rank {})",
               fmt::join(lines(), "\n  "), rank_);
}

Audit& Audits::add(Audit audit) {
  std::unique_ptr<Audit>& own = audits_[ranks_.index(audit.rank())];
  own = std::make_unique<Audit>(std::move(audit));
  return *own;
}

const Audit& Audits::shown() const {
  const auto wrong = std::ranges::find_if(audits_, [](const auto& a) { return a->differs(); });
  return wrong == audits_.end() ? first() : **wrong;
}

std::vector<std::string> Audits::lines() const {
  const Audit& shown = this->shown();
  std::vector<std::string> lines = shown.lines();
  if (std::string gathers = shown.gathers_line(); !gathers.empty()) {
    lines.insert(lines.end() - 1, std::move(gathers));
  }
  if (ranks_.world_size > 1 && shown.num_steps() > 0) {
    lines.back() += shown.differs() || ranks_.count == 1
                        ? fmt::format(" on rank {}", shown.rank())
                        : fmt::format(" on each of {} ranks", ranks_.count);
  }
  return lines;
}

}  // namespace tessera::tools

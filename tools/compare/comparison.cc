#include "tools/compare/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "engine/io/text.h"
#include "tools/compare/pareto.h"
#include "tools/train/time_split.h"

namespace tessera::tools {
namespace {

std::map<std::string, Spread> spreads(const std::vector<RunRecord>& rounds, std::int64_t warmup) {
  std::map<std::string, Spread> result;
  for (const std::string& name : metric_names()) {
    std::vector<double> values;
    bool is_told = true;
    for (const RunRecord& run : rounds) {
      const auto metric = run.metrics.find(name);
      if (metric == run.metrics.end()) {
        is_told = false;
        break;
      }
      const std::span<const double> measured = behind_warmup(metric->second, warmup);
      values.insert(values.end(), measured.begin(), measured.end());
    }
    std::erase_if(values, [](double value) { return std::isnan(value); });
    const std::optional<Spread> spread = spread_of(std::move(values));
    if (is_told && spread) result[name] = *spread;
  }
  return result;
}

std::optional<StepParts> step_parts_of(const std::vector<RunRecord>& rounds,
                                       const std::map<std::string, Spread>& metrics,
                                       std::int64_t warmup) {
  const auto step = metrics.find("step_ms");
  if (step == metrics.end()) return std::nullopt;
  constexpr std::array kParts = {"compute_ms", "exposed_comm_ms", "optimizer_ms", "data_ms"};
  TimeSplit split(kParts.size() + 1);
  for (const RunRecord& run : rounds) {
    const std::span<const double> steps_ms = behind_warmup(run.metrics.at("step_ms"), warmup);
    for (std::size_t i = 0; i < steps_ms.size(); ++i) {
      std::array<std::optional<double>, kParts.size() + 1> parts_ms;
      double other_ms = steps_ms[i];
      for (std::size_t k = 0; k < kParts.size(); ++k) {
        if (!metrics.contains(kParts[k])) continue;
        parts_ms[k] = behind_warmup(run.metrics.at(kParts[k]), warmup)[i];
        other_ms -= *parts_ms[k];
      }
      parts_ms.back() = other_ms;
      split.add(steps_ms[i], parts_ms);
    }
  }
  const auto ms = [&](std::size_t part) -> std::optional<double> {
    const std::optional<double> share = split.share(part);
    return share ? std::optional(*share * step->second.median) : std::nullopt;
  };
  return StepParts{.compute_ms = ms(0),
                   .exposed_comm_ms = ms(1),
                   .optimizer_ms = ms(2),
                   .data_ms = ms(3),
                   .other_ms = ms(kParts.size()).value_or(0)};
}

std::string count_of(std::size_t n, const char* what) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

std::string names_of(const std::vector<const Row*>& rows, std::size_t most = 5) {
  std::vector<std::string> names;
  for (const Row* row : rows) {
    if (names.size() == most) {
      names.push_back(fmt::format("{} more", rows.size() - most));
      break;
    }
    names.push_back(row->configuration->name);
  }
  return engine::join(names, "; ");
}

std::vector<const Row*> rows_where(const std::vector<Row>& rows, auto holds) {
  std::vector<const Row*> result;
  for (const Row& row : rows) {
    if (holds(row)) result.push_back(&row);
  }
  return result;
}

std::string differing_text(const std::vector<const Row*>& rows, const std::string& baseline) {
  // Whose explanation is long is explained once: the table has the others.
  const std::string& text = rows.front()->parity.text;
  const bool is_alike =
      std::ranges::all_of(rows, [&](const Row* row) { return row->parity.text == text; });
  return fmt::format("Parity fails: {} {} from {}: {} ({}{}). ",
                     count_of(rows.size(), "configuration"),
                     rows.size() == 1 ? "differs" : "differ", baseline, names_of(rows, 3),
                     is_alike ? "" : "the first: ", text);
}

std::string agreeing_text(const std::vector<Row>& rows, std::size_t num_equal,
                          std::size_t num_within, const Request& request) {
  const Configuration& baseline = request.configurations.front();
  std::string text;
  if (num_equal > 1) {
    text = fmt::format(
        "{} {} configurations give the same bits: the loss of all {} steps and every parameter "
        "at the end. ",
        num_equal == rows.size() ? "All" : "These", num_equal, baseline.config.train.steps);
    if (num_equal != rows.size()) {
      text = fmt::format(
          "{} of {} configurations give the same bits: the loss of all {} steps and every "
          "parameter at the end. ",
          num_equal, rows.size(), baseline.config.train.steps);
    }
  }
  if (num_within > 0) {
    text += fmt::format("{} with another arithmetic {} within {:g} of the loss of {}. ",
                        count_of(num_within, "configuration"), num_within == 1 ? "stays" : "stay",
                        request.compare.tolerance, baseline.name);
  }
  if (text.empty()) text = "There is nothing to compare with. ";
  return text;
}

const Row* row_with_least(const std::vector<Row>& rows, auto value) {
  const Row* found = nullptr;
  for (const Row& row : rows) {
    if (!value(row)) continue;
    if (found == nullptr || *value(row) < *value(*found)) found = &row;
  }
  return found;
}

// What people look for next; nothing unless it is known of all that were trained.
std::string best_text(const std::vector<Row>& rows) {
  const Row* smallest = row_with_least(rows, [](const Row& row) { return row.peak_nbytes(); });
  std::string text;
  if (const std::optional<Fastest> fastest = fastest_of(rows)) {
    text += fmt::format("Fastest: {} at {:.3g} ms a step", fastest->row->configuration->name,
                        *fastest->row->median("step_ms"));
    const std::vector<const Row*>& others = fastest->not_told_apart;
    if (!others.empty()) {
      text += fmt::format(
          ", not told apart from {} whose quartiles overlap ({}); more --rounds or --train.steps "
          "would",
          count_of(others.size(), "configuration"), names_of(others, 3));
    }
    text += ". ";
  }
  if (smallest != nullptr) {
    text += fmt::format("Least memory: {} with {:.1f} MiB a rank. ", smallest->configuration->name,
                        double(*smallest->peak_nbytes()) / (1 << 20));
  }
  return text;
}

Verdict verdict_of(const Comparison& comparison) {
  const std::vector<Row>& rows = comparison.rows;
  const auto of_kind = [&](ParityKind kind) {
    return rows_where(rows, [&](const Row& row) { return row.parity.kind == kind; });
  };
  const auto differing = of_kind(ParityKind::kDiffers);
  const auto failed = rows_where(rows, [](const Row& r) { return !r.trained.failure.empty(); });
  const auto missing =
      rows_where(rows, [](const Row& r) { return !r.complete && r.trained.failure.empty(); });
  Verdict verdict{.agrees = differing.empty(),
                  .failed = !failed.empty(),
                  .has_baseline = !rows.front().trained.rounds.empty(),
                  .complete = missing.empty() && failed.empty()};
  std::string& text = verdict.sentence;
  if (!differing.empty()) {
    text += differing_text(differing, comparison.request->configurations.front().name);
  } else {
    text += agreeing_text(rows, of_kind(ParityKind::kEqualBits).size(),
                          of_kind(ParityKind::kWithin).size(), *comparison.request);
  }
  if (!failed.empty()) text += fmt::format("Failed: {}. ", names_of(failed));
  if (!missing.empty()) {
    text += fmt::format("Not complete: {} of {} missing ({}); --resume goes on. ", missing.size(),
                        count_of(rows.size(), "configuration"), names_of(missing));
  }
  if (verdict.passed() && verdict.complete) text += best_text(rows);
  while (text.ends_with(' ')) text.pop_back();
  return verdict;
}

}  // namespace

std::optional<double> Row::median(const std::string& metric) const {
  const auto found = metrics.find(metric);
  return found == metrics.end() ? std::nullopt : std::optional(found->second.median);
}

std::optional<std::int64_t> Row::peak_nbytes() const {
  std::optional<std::int64_t> most;
  for (const RunRecord& run : trained.rounds) {
    const auto total = run.peak_bytes.find("total");
    if (total != run.peak_bytes.end()) most = std::max(most.value_or(0), total->second);
  }
  return most;
}

std::optional<std::int64_t> Row::planned_peak_nbytes() const {
  if (trained.rounds.empty()) return std::nullopt;
  const BytesByCategory& planned = trained.rounds.front().planned_peak_bytes;
  const auto total = planned.find("total");
  return total == planned.end() ? std::nullopt : std::optional(total->second);
}

std::optional<Fastest> fastest_of(const std::vector<Row>& rows) {
  Fastest fastest{.row = row_with_least(rows, [](const Row& r) { return r.median("step_ms"); })};
  if (fastest.row == nullptr) return std::nullopt;
  const double q3 = fastest.row->metrics.at("step_ms").q3;
  for (const Row& row : rows) {
    const auto step = row.metrics.find("step_ms");
    if (&row == fastest.row || step == row.metrics.end()) continue;
    // Its median is no smaller, so it can only overlap from above.
    if (step->second.q1 <= q3) fastest.not_told_apart.push_back(&row);
  }
  return fastest;
}

Comparison summarise(const Request& request, std::vector<Trained> trained) {
  Comparison comparison{.request = &request};
  const Configuration& baseline = request.configurations.front();
  std::vector<std::optional<Choice>> choices;
  for (std::size_t i = 0; i < request.configurations.size(); ++i) {
    const Configuration& c = request.configurations[i];
    Row row{.configuration = &c, .trained = std::move(trained[i])};
    row.complete = std::ssize(row.trained.rounds) == request.compare.rounds;
    row.metrics = spreads(row.trained.rounds, request.compare.warmup_steps);
    row.step_parts = step_parts_of(row.trained.rounds, row.metrics, request.compare.warmup_steps);
    if (!row.trained.rounds.empty()) row.last_loss = row.trained.rounds.front().loss.back();
    row.memory_theory = memory_formulas(c);
    row.sent_theory = sent_formula(c);
    const auto bytes = row.peak_nbytes();
    const auto speed = row.median("tokens_per_s");
    choices.push_back(bytes && speed ? std::optional(Choice{double(*bytes), *speed})
                                     : std::nullopt);
    comparison.rows.push_back(std::move(row));
  }
  const std::vector<RunRecord>& first = comparison.rows.front().trained.rounds;
  const std::vector<bool> front = pareto_front(choices);
  for (std::size_t i = 0; i < comparison.rows.size(); ++i) {
    Row& row = comparison.rows[i];
    row.is_on_front = front[i];
    std::vector<std::string> reasons = arithmetic_differences(baseline, *row.configuration);
    if (first.empty() || row.trained.rounds.empty()) {
      row.parity = {.reasons = std::move(reasons), .text = "not trained"};
      if (!row.trained.rounds.empty()) row.parity.text = "no baseline";
      continue;
    }
    row.parity = compare_runs(first.front(), row.trained.rounds, std::move(reasons),
                              request.compare.tolerance);
  }
  comparison.verdict = verdict_of(comparison);
  return comparison;
}

}  // namespace tessera::tools

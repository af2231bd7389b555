#include "tools/compare/comparison/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "engine/io/text.h"
#include "tools/report/time_split.h"

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
      const std::span<const double> measured = after_warmup(metric->second, warmup);
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
    const std::span<const double> steps_ms = after_warmup(run.metrics.at("step_ms"), warmup);
    for (std::size_t i = 0; i < steps_ms.size(); ++i) {
      std::array<std::optional<double>, kParts.size() + 1> parts_ms;
      double other_ms = steps_ms[i];
      for (std::size_t k = 0; k < kParts.size(); ++k) {
        if (!metrics.contains(kParts[k])) continue;
        parts_ms[k] = after_warmup(run.metrics.at(kParts[k]), warmup)[i];
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

// The speed of each round; none if that of any is not known.
std::vector<double> speeds_of(const std::vector<RunRecord>& rounds, std::int64_t warmup) {
  std::vector<double> speeds;
  for (const RunRecord& run : rounds) {
    const auto metric = run.metrics.find("tokens_per_s");
    if (metric == run.metrics.end()) return {};
    const std::span<const double> measured = after_warmup(metric->second, warmup);
    const std::optional<Spread> spread = spread_of({measured.begin(), measured.end()});
    if (!spread || !(spread->median > 0)) return {};
    speeds.push_back(spread->median);
  }
  return speeds;
}

std::string name_of(const Row& row) { return row.configuration->name; }

// Of a row that was trained, in a comparison whose rows and classes are known.
Parity parity_of(const Comparison& all, const Row& row) {
  const std::vector<RunRecord>& rounds = row.trained.rounds;
  const double tolerance = all.request->compare.tolerance;
  const ArithmeticClass& own = all.classes[row.class_index];
  const Row& reference = *all.reference_of(own);
  Parity parity = compare_runs(reference.trained.rounds.front(), rounds, {}, tolerance);
  parity.reference = name_of(reference);
  if (&reference != &row || row.class_index == 0) return parity;
  if (parity.kind == ParityKind::kDiffers) return parity;  // from round to round
  if (own.measured_against == row.class_index) {
    return {.kind = ParityKind::kAnother,
            .reasons = own.changes,
            .max_difference = std::numeric_limits<double>::quiet_NaN(),
            .text = fmt::format("another training ({})", engine::join(own.changes, ", "))};
  }
  const Row* other = all.reference_of(all.classes[own.measured_against]);
  if (other == nullptr) return {.reasons = own.changes, .text = "no baseline"};
  parity = compare_runs(other->trained.rounds.front(), rounds, own.changes, tolerance);
  parity.reference = name_of(*other);
  return parity;
}

// Whether no other is sure to beat it: faster beyond noise, with no more memory.
void find_front(Comparison& all) {
  if (!all.speeds.fastest) return;
  for (std::size_t i = 0; i < all.rows.size(); ++i) {
    const std::optional<std::int64_t> mine = all.rows[i].peak_nbytes();
    if (all.rows[i].speeds.empty() || !mine) continue;
    bool is_beaten = false;
    for (std::size_t k = 0; k < all.rows.size(); ++k) {
      const std::optional<std::int64_t> others = all.rows[k].peak_nbytes();
      is_beaten = is_beaten || (others && *others <= *mine && all.speeds.faster[k][i]);
    }
    all.rows[i].is_on_front = !is_beaten;
  }
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

const Row* Comparison::reference_of(const ArithmeticClass& c) const {
  for (const std::size_t i : c.members) {
    if (!rows[i].trained.rounds.empty()) return &rows[i];
  }
  return nullptr;
}

Comparison summarise(const Request& request, std::vector<Trained> trained) {
  Comparison comparison{.request = &request, .classes = classes_of(request.configurations)};
  const std::int64_t warmup = request.compare.warmup_steps;
  std::vector<std::vector<double>> speeds;
  for (std::size_t i = 0; i < request.configurations.size(); ++i) {
    const Configuration& c = request.configurations[i];
    Row row{.configuration = &c, .trained = std::move(trained[i])};
    if (c.same_plan_as) row.same_plan_as = &request.configurations[*c.same_plan_as];
    row.complete = c.same_plan_as || std::ssize(row.trained.rounds) == request.compare.rounds;
    row.metrics = spreads(row.trained.rounds, warmup);
    row.step_parts = step_parts_of(row.trained.rounds, row.metrics, warmup);
    if (!row.trained.rounds.empty()) row.last_loss = row.trained.rounds.front().loss.back();
    // A round that failed leaves those after it without their number.
    if (row.trained.failure.empty()) row.speeds = speeds_of(row.trained.rounds, warmup);
    speeds.push_back(row.speeds);
    comparison.rows.push_back(std::move(row));
  }
  for (std::size_t i = 0; i < comparison.classes.size(); ++i) {
    for (const std::size_t member : comparison.classes[i].members) {
      comparison.rows[member].class_index = i;
    }
  }
  for (Row& row : comparison.rows) {
    if (row.same_plan_as != nullptr) {
      row.parity.text = "same plan as " + row.same_plan_as->name;
    } else if (row.trained.rounds.empty()) {
      row.parity.text = "not trained";
    } else {
      row.parity = parity_of(comparison, row);
    }
  }
  comparison.speeds = compare_speeds(speeds);
  find_front(comparison);
  comparison.verdict = verdict_of(comparison);
  return comparison;
}

}  // namespace tessera::tools

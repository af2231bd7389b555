#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/io/text.h"
#include "tools/compare/comparison/comparison.h"

namespace tessera::tools {
namespace {

using Rows = std::vector<const Row*>;

Rows rows_where(const std::vector<Row>& rows, auto holds) {
  Rows result;
  for (const Row& row : rows) {
    if (holds(row)) result.push_back(&row);
  }
  return result;
}

std::string names_of(const Rows& rows, std::size_t most = 3) {
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

std::string difference_text(const Row& row, double tolerance) {
  const Parity& p = row.parity;
  const std::string& name = row.configuration->name;
  const bool is_itself = name == p.reference;
  const std::string from = is_itself ? "itself in another round" : p.reference;
  if (!p.same_length) return fmt::format("{} has another number of steps than {}", name, from);
  if (!p.first_step) {
    return fmt::format("{} ends with other parameters than {}, after equal losses", name, from);
  }
  const bool is_finite = std::isfinite(p.max_difference);
  return fmt::format(
      "{} differs from {} {}{}, first in step {}", name, from,
      is_finite ? "by up to " + distance_text(p.max_difference) : "in what is not finite",
      is_finite && !p.reasons.empty() ? fmt::format(" ({:g} allowed)", tolerance) : "",
      *p.first_step);
}

std::string differing_line(const Rows& differing, double tolerance) {
  const std::string more = differing.size() == 1
                               ? ""
                               : fmt::format("; {} more differ{}", differing.size() - 1,
                                             differing.size() == 2 ? "s" : "");
  return fmt::format("Parity fails: {}{}.", difference_text(*differing.front(), tolerance), more);
}

// "2.513 (train.lr=0.001), 2.432 (train.lr=0.002)": of the trainings that have no parity.
std::string losses_text(const Comparison& all) {
  constexpr std::size_t kMost = 4;
  std::vector<std::string> losses;
  for (std::size_t i = 0; i < all.classes.size(); ++i) {
    const ArithmeticClass& c = all.classes[i];
    const Row* row = all.reference_of(c);
    if (c.measured_against != i || row == nullptr || !row->last_loss) continue;
    losses.push_back(fmt::format("{:.4g} ({})", *row->last_loss, c.label));
  }
  const std::size_t num_losses = losses.size();
  if (num_losses > kMost) {
    losses.resize(kMost);
    losses.push_back(fmt::format("{} more in the table", num_losses - kMost));
  }
  return engine::join(losses, ", ");
}

// What agrees within classes, and how far apart they are.
std::string agreeing_line(const Comparison& all) {
  const double tolerance = all.request->compare.tolerance;
  const Rows trained = rows_where(all.rows, [](const Row& r) { return !r.trained.rounds.empty(); });
  const Rows within =
      rows_where(all.rows, [](const Row& r) { return r.parity.kind == ParityKind::kWithin; });
  const Rows others =
      rows_where(all.rows, [](const Row& r) { return r.parity.kind == ParityKind::kAnother; });
  std::size_t num_classes = 0, num_of_several = 0;  // that were trained
  for (const ArithmeticClass& c : all.classes) {
    const auto n = std::ranges::count_if(
        c.members, [&](std::size_t i) { return !all.rows[i].trained.rounds.empty(); });
    num_classes += n > 0 ? 1 : 0;
    num_of_several += n > 1 ? 1 : 0;
  }
  std::string text;
  const bool is_one = within.empty() && others.empty();
  if (is_one && trained.size() < 2) return "There is nothing to compare with.";
  if (is_one || num_of_several > 0) {
    const std::string all_of = trained.size() == 2 ? "both" : fmt::format("all {}", trained.size());
    text = is_one ? fmt::format(
                        "Parity holds: {} {} give the same bits (loss of every step, all "
                        "parameters at the end)",
                        all_of,
                        trained.size() == all.rows.size() ? "configurations" : "that were trained")
                  : fmt::format(
                        "Parity holds: the same bits within each of {} classes of equal "
                        "arithmetic",
                        num_classes);
  }
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
  if (!within.empty()) {
    const Row& farthest = **std::ranges::max_element(
        within, {}, [](const Row* row) { return row->parity.max_difference; });
    add(difference_text(farthest, tolerance));
  }
  if (!others.empty()) {
    std::set<std::string> options;
    for (const Row* row : others)
      options.insert(row->parity.reasons.begin(), row->parity.reasons.end());
    add(fmt::format("{} {} another training, with nothing to be equal; last losses {}",
                    engine::join(std::vector(options.begin(), options.end()), ", "),
                    options.size() == 1 ? "makes" : "make", losses_text(all)));
  }
  return text + ".";
}

std::string percent_text(double ratio) { return fmt::format("{:.1f} %", 100 * (ratio - 1)); }

// Nothing unless there are two to choose from.
std::string fastest_line(const Comparison& all) {
  const Speeds& speeds = all.speeds;
  if (speeds.rounds_needed == 0) return "";
  if (!speeds.fastest) {
    const auto num_known =
        std::ranges::count_if(all.rows, [](const Row& r) { return !r.speeds.empty(); });
    return fmt::format(
        "Fastest: too few rounds to say; {} configurations need --rounds={} (--resume keeps what "
        "is "
        "trained).",
        num_known, speeds.rounds_needed);
  }
  const Row& row = all.rows[*speeds.fastest];
  const std::string& name = row.configuration->name;
  double least = HUGE_VAL, most = 1;  // how many times as fast as the others it is
  for (const std::optional<RatioInterval>& ratio : speeds.fastest_ratio) {
    if (!ratio) continue;
    least = std::min(least, ratio->low);
    most = std::max(most, ratio->high);
  }
  const std::size_t num_others = static_cast<std::size_t>(
      std::ranges::count_if(speeds.fastest_ratio, [](const auto& r) { return r.has_value(); }));
  const std::size_t num_as_fast = speeds.as_fast.size();
  if (num_as_fast == num_others) {
    return fmt::format(
        "Fastest: none stands out; {} are as fast within noise (none more than {} slower than "
        "{}).",
        num_others == 1 ? "both" : fmt::format("all {}", num_others + 1), percent_text(most), name);
  }
  const std::string speed =
      fmt::format("Fastest: {} with {} tokens/s", name,
                  engine::with_commas(std::llround(*row.median("tokens_per_s"))));
  if (num_as_fast == 0) {
    return fmt::format("{}; {} at least {} slower.", speed,
                       num_others == 1 ? "the other is" : "all others are", percent_text(least));
  }
  return fmt::format("{}; {} may be as fast (within noise); run more --rounds.", speed,
                     num_as_fast == 1 ? all.rows[speeds.as_fast.front()].configuration->name
                                      : fmt::format("{} others", num_as_fast));
}

std::string memory_line(const std::vector<Row>& rows) {
  std::optional<std::int64_t> least;
  const Rows known = rows_where(rows, [](const Row& r) { return r.peak_nbytes().has_value(); });
  if (known.size() < 2) return "";
  for (const Row* row : known)
    least = std::min(least.value_or(*row->peak_nbytes()), *row->peak_nbytes());
  const Rows smallest = rows_where(rows, [&](const Row& r) { return r.peak_nbytes() == least; });
  return fmt::format("Least memory: {}{} with {:.2f} MiB a rank.", names_of(smallest),
                     smallest.size() == 1 ? "" : ", each", double(*least) / (1 << 20));
}

}  // namespace

Verdict verdict_of(const Comparison& comparison) {
  const std::vector<Row>& rows = comparison.rows;
  const double tolerance = comparison.request->compare.tolerance;
  const Rows differing =
      rows_where(rows, [](const Row& r) { return r.parity.kind == ParityKind::kDiffers; });
  const Rows failed = rows_where(rows, [](const Row& r) { return !r.trained.failure.empty(); });
  const Rows missing =
      rows_where(rows, [](const Row& r) { return !r.complete && r.trained.failure.empty(); });
  Verdict verdict{.agrees = differing.empty(),
                  .failed = !failed.empty(),
                  .has_baseline = !rows.front().trained.rounds.empty(),
                  .complete = missing.empty() && failed.empty()};
  std::vector<std::string>& lines = verdict.lines;
  lines.push_back(differing.empty() ? agreeing_line(comparison)
                                    : differing_line(differing, tolerance));
  if (!failed.empty()) lines.push_back(fmt::format("Failed: {}.", names_of(failed)));
  if (!missing.empty()) {
    lines.push_back(fmt::format("Not complete: {} of {} missing ({}); --resume goes on.",
                                missing.size(), rows.size(), names_of(missing)));
  }
  if (verdict.passed() && verdict.complete) {
    lines.push_back(fastest_line(comparison));
    lines.push_back(memory_line(rows));
  }
  std::erase(lines, "");
  return verdict;
}

}  // namespace tessera::tools

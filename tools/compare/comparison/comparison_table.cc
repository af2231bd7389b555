#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "engine/io/text.h"
#include "tools/compare/comparison/comparison.h"

namespace tessera::tools {
namespace {

constexpr const char* kNotMeasured = "not measured";
constexpr double kMiB = 1 << 20;
constexpr const char* kSlower = "slower % [interval]";  // without it the verdict says why

struct Column {
  std::string head;
  std::function<std::string(const Row&)> text;
  bool is_number = true;
};

std::string number(const std::optional<double>& value, const char* format, double unit = 1) {
  return value ? fmt::format(fmt::runtime(format), *value / unit) : kNotMeasured;
}

std::string step_text(const Row& row) {
  const auto found = row.metrics.find("step_ms");
  if (found == row.metrics.end()) return kNotMeasured;
  const Spread& s = found->second;
  return fmt::format("{:.2f} [{:.2f}, {:.2f}]", s.median, s.q1, s.q3);
}

std::optional<double> as_double(const std::optional<std::int64_t>& value) {
  return value ? std::optional(static_cast<double>(*value)) : std::nullopt;
}

std::optional<double> planned_sent(const Row& row) {
  return row.trained.rounds.empty() ? std::nullopt
                                    : as_double(row.trained.rounds.front().planned_sent_bytes);
}

std::string differs_text(const Parity& p) {
  if (!p.same_length) return "DIFFERS in steps";
  if (!p.first_step) return "DIFFERS in parameters";
  return std::isfinite(p.max_difference) ? "DIFFERS by " + distance_text(p.max_difference)
                                         : "DIFFERS, not finite";
}

std::string parity_text(const Comparison& all, const Row& row) {
  if (!row.trained.failure.empty()) return "failed";
  const Parity& p = row.parity;
  switch (p.kind) {
    case ParityKind::kEqualBits:
      return &row == &all.rows.front() ? "baseline" : p.text;
    case ParityKind::kWithin:
      if (!p.first_step) return "other parameters at the end";  // after equal losses
      return fmt::format("{} of {:g} allowed", distance_text(p.max_difference),
                         all.request->compare.tolerance);
    case ParityKind::kDiffers:
      return differs_text(p);
    case ParityKind::kAnother:
      return name_of(p.kind);
    case ParityKind::kUnknown:
      break;
  }
  return p.text;
}

std::string slower_text(const Comparison& all, std::size_t i) {
  const Speeds& speeds = all.speeds;
  if (speeds.fastest == i) return "fastest";
  const std::optional<RatioInterval>& ratio = speeds.fastest_ratio[i];
  if (!ratio) return kNotMeasured;
  const auto percent = [](double times) { return 100 * (times - 1); };
  return fmt::format("{:.1f} [{:.1f}, {:.1f}]", percent(ratio->middle), percent(ratio->low),
                     percent(ratio->high));
}

std::vector<Column> columns(const Comparison& comparison) {
  std::vector<Column> all = {
      {"configuration", [](const Row& r) { return engine::escaped(r.configuration->name); }, false},
      {"parity", [&](const Row& r) { return parity_text(comparison, r); }, false},
      {"loss",
       [](const Row& r) { return r.last_loss ? fmt::format("{:.4f}", *r.last_loss) : "-"; }},
      {"step ms [quartiles]", step_text},
      {"exposed ms", [](const Row& r) { return number(r.median("exposed_comm_ms"), "{:.2f}"); }},
      {"tokens/s", [](const Row& r) { return number(r.median("tokens_per_s"), "{:.0f}"); }},
      {kSlower,
       [&](const Row& r) {
         return slower_text(comparison, static_cast<std::size_t>(&r - comparison.rows.data()));
       }},
      {"peak MiB", [](const Row& r) { return number(as_double(r.peak_nbytes()), "{:.2f}", kMiB); }},
      {"planned",
       [](const Row& r) { return number(as_double(r.planned_peak_nbytes()), "{:.2f}", kMiB); }},
      {"sent MiB", [](const Row& r) { return number(r.median("sent_bytes"), "{:.2f}", kMiB); }},
      {"planned", [](const Row& r) { return number(planned_sent(r), "{:.2f}", kMiB); }},
      {"overlap %", [](const Row& r) { return number(r.median("overlap"), "{:.0f}", 0.01); }},
  };
  if (comparison.classes.size() > 1) {
    all.insert(all.begin() + 1,
               {"class", [](const Row& r) { return std::to_string(r.class_index + 1); }});
  }
  return all;
}

std::string cell_text(const Column& column, const Row& row) {
  std::string text = column.text(row);
  return text == kNotMeasured && row.trained.rounds.empty() ? "-" : text;
}

// What sets each class apart, and how far it is from the one that it is measured against.
std::string classes_text(const Comparison& all) {
  constexpr std::size_t kMost = 10;
  if (all.classes.size() < 2) return "";
  std::string text;
  for (std::size_t i = 0; i < std::min(all.classes.size(), kMost); ++i) {
    const ArithmeticClass& c = all.classes[i];
    const Row* row = all.reference_of(c);
    const bool is_measured = c.measured_against != i && row != nullptr;
    text += fmt::format("class {}: {}{}\n", i + 1, engine::escaped(c.label),
                        is_measured ? fmt::format(" (against class {}: {})", c.measured_against + 1,
                                                  row->parity.text)
                        : i == 0    ? ""
                                    : " (another training)");
  }
  if (all.classes.size() > kMost)
    text += fmt::format("{} more classes\n", all.classes.size() - kMost);
  return text;
}

}  // namespace

std::string table_text(const Comparison& comparison) {
  const std::vector<Column> all = columns(comparison);
  std::vector<std::size_t> shown;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // A column that no row can tell is left out; the last line says which.
    const bool is_told = std::ranges::any_of(
        comparison.rows, [&](const Row& row) { return all[i].text(row) != kNotMeasured; });
    if (is_told) shown.push_back(i);
  }
  std::vector<std::string> untold;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::ranges::count(shown, i) != 0 || all[i].head == kSlower) continue;
    const bool is_plan = all[i].head == "planned";
    untold.push_back(is_plan ? all[i - 1].head + " planned" : all[i].head);
  }
  std::string text;
  std::vector<std::size_t> widths;
  for (const std::size_t i : shown) {
    std::size_t width = all[i].head.size();
    for (const Row& row : comparison.rows) width = std::max(width, cell_text(all[i], row).size());
    widths.push_back(width);
  }
  const auto add_line = [&](const std::function<std::string(const Column&)>& cell) {
    std::string line;
    for (std::size_t j = 0; j < shown.size(); ++j) {
      const Column& column = all[shown[j]];
      line += j == 0 ? "" : "  ";
      line += column.is_number ? fmt::format("{:>{}}", cell(column), widths[j])
                               : fmt::format("{:<{}}", cell(column), widths[j]);
    }
    while (line.ends_with(' ')) line.pop_back();
    text += line + "\n";
  };
  add_line([](const Column& column) { return column.head; });
  for (const Row& row : comparison.rows) {
    add_line([&](const Column& column) { return cell_text(column, row); });
  }
  if (!untold.empty()) text += fmt::format("not measured: {}\n", engine::join(untold, ", "));
  return text + classes_text(comparison);
}

}  // namespace tessera::tools

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "engine/io/text.h"
#include "tools/compare/comparison.h"

namespace tessera::tools {
namespace {

constexpr const char* kNotMeasured = "not measured";
constexpr double kMiB = 1 << 20;

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

std::string parity_text(const Row& row, const Row& baseline) {
  if (!row.trained.failure.empty()) return "failed";
  if (&row == &baseline && row.parity.kind == ParityKind::kEqualBits) return "baseline";
  if (row.parity.kind == ParityKind::kWithin || row.parity.kind == ParityKind::kDiffers) {
    const bool within = row.parity.kind == ParityKind::kWithin;
    const std::string distance = !row.parity.first_step ? "parameters"
                                 : !std::isfinite(row.parity.max_difference)
                                     ? "not finite"
                                     : fmt::format("{:.2e}", row.parity.max_difference);
    return fmt::format("{} {}", within ? "within" : "DIFFERS", distance);
  }
  return row.parity.text;
}

std::vector<Column> columns(const Comparison& comparison) {
  const Row& baseline = comparison.rows.front();
  return {
      {"configuration", [](const Row& r) { return engine::escaped(r.configuration->name); }, false},
      {"parity", [&](const Row& r) { return parity_text(r, baseline); }, false},
      {"loss",
       [](const Row& r) { return r.last_loss ? fmt::format("{:.4f}", *r.last_loss) : "-"; }},
      {"step ms [quartiles]", step_text},
      {"exposed ms", [](const Row& r) { return number(r.median("exposed_comm_ms"), "{:.2f}"); }},
      {"tokens/s", [](const Row& r) { return number(r.median("tokens_per_s"), "{:.0f}"); }},
      {"peak MiB", [](const Row& r) { return number(as_double(r.peak_nbytes()), "{:.2f}", kMiB); }},
      {"planned",
       [](const Row& r) { return number(as_double(r.planned_peak_nbytes()), "{:.2f}", kMiB); }},
      {"sent MiB", [](const Row& r) { return number(r.median("sent_bytes"), "{:.2f}", kMiB); }},
      {"planned", [](const Row& r) { return number(planned_sent(r), "{:.2f}", kMiB); }},
      {"overlap %", [](const Row& r) { return number(r.median("overlap"), "{:.0f}", 0.01); }},
  };
}

}  // namespace

std::string table_text(const Comparison& comparison) {
  const std::vector<Column> all = columns(comparison);
  std::vector<std::vector<std::string>> lines(1 + comparison.rows.size());
  std::vector<std::size_t> shown;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // A column that no row can tell is left out; the last line says which.
    const bool is_told = std::ranges::any_of(
        comparison.rows, [&](const Row& row) { return all[i].text(row) != kNotMeasured; });
    if (is_told) shown.push_back(i);
  }
  std::vector<std::string> untold;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::ranges::count(shown, i) != 0) continue;
    const bool is_plan = all[i].head == "planned";
    untold.push_back(is_plan ? all[i - 1].head + " planned" : all[i].head);
  }
  std::string text;
  std::vector<std::size_t> widths;
  for (const std::size_t i : shown) {
    std::size_t width = all[i].head.size();
    for (const Row& row : comparison.rows) width = std::max(width, all[i].text(row).size());
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
    add_line([&](const Column& column) { return column.text(row); });
  }
  if (!untold.empty()) text += fmt::format("not measured: {}\n", engine::join(untold, ", "));
  return text;
}

}  // namespace tessera::tools

#include "tools/compare/page/report_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "engine/io/text.h"
#include "tools/compare/page/report_page.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

struct Unit {
  const char* name;
  double size;
  double from;  ///< the largest figure of a column that is told in it
};
constexpr std::array<Unit, 5> kBytes = {Unit{"B", 1, 0}, Unit{"KiB", 0x1p10, 0x1p10},
                                        Unit{"MiB", 0x1p20, 0x1p20}, Unit{"GiB", 0x1p30, 0x1p30},
                                        Unit{"TiB", 0x1p40, 0x1p40}};
constexpr std::array<Unit, 2> kMs = {Unit{"ms", 1, 0}, Unit{"s", 1000, 10000}};
constexpr std::array<Unit, 1> kPercent = {Unit{"%", 0.01, 0}};
constexpr std::array<Unit, 1> kOfHundred = {Unit{"%", 1, 0}};
constexpr std::array<Unit, 1> kPlain = {Unit{"", 1, 0}};

const ordered_json& find(const ordered_json& object, const char* name) {
  static const ordered_json none;
  if (!object.is_object() || !object.contains(name)) return none;
  return object.at(name);
}

// A column of figures of one kind: their unit, and as many decimals as the largest of them needs.
struct Column {
  std::string head;
  const char* field;
  std::span<const Unit> units;
  int most_decimals;
  using Get = std::function<const ordered_json&(const ordered_json& row)>;
  Get figure, planned;
  /// Of a figure that is an object: its middle, and what it lies between.
  const char *middle = nullptr, *low = nullptr, *high = nullptr;

  Unit unit = kPlain[0];
  int decimals = 0;

  const ordered_json& value(const ordered_json& row) const {
    return middle == nullptr ? figure(row) : find(figure(row), middle);
  }
  void fit(const ordered_json& rows) {
    double most = 0;
    for (const ordered_json& row : rows) {
      for (const ordered_json* known : {&value(row), &planned(row)}) {
        if (known->is_number()) most = std::max(most, std::abs(known->get<double>()));
      }
    }
    unit = units[0];
    for (const Unit& u : units) {
      if (most >= u.from) unit = u;
    }
    const double shown = most / unit.size;
    decimals = unit.size == 1 && units.data() == kBytes.data() ? 0
               : shown >= 1000                                 ? 0
               : shown >= 100                                  ? 1
                                                               : 2;
    decimals = std::min(decimals, most_decimals);
    if (unit.name[0] != '\0') head += std::string(", ") + unit.name;
  }
  std::string text(double figure) const {
    const double shown = figure / unit.size;
    if (decimals == 0) return engine::with_commas(std::llround(shown));
    return fmt::format("{:.{}f}", shown, decimals);
  }
};

std::string cell(const std::string& attributes, const std::string& text) {
  return fmt::format("<td{}>{}</td>", attributes, text);
}

std::string unknown_cell(const char* words) {
  return cell(R"( class="unknown" data-value="")", words);
}

std::string below(const std::string& attributes, const std::string& text) {
  return fmt::format(R"(<small class="below"{}>{}</small>)", attributes, text);
}

// `reference`: what the row that others are said to be slower than is called; empty: not this one.
std::string figure_cell(const Column& column, const ordered_json& row,
                        const std::string& reference) {
  const ordered_json& value = column.value(row);
  if (!value.is_number()) {
    const bool is_slower = std::string_view(column.field) == "slower_percent";
    return unknown_cell(is_slower && !reference.empty() ? reference.c_str() : "not measured");
  }
  std::string text = column.text(value.get<double>());
  if (column.low != nullptr) {
    const ordered_json& spread = column.figure(row);
    text += below("", fmt::format("{} to {}", column.text(spread.at(column.low).get<double>()),
                                  column.text(spread.at(column.high).get<double>())));
  }
  if (const ordered_json& planned = column.planned(row); planned.is_number()) {
    text += below(
        fmt::format(R"( data-field="planned_{}" data-value="{}")", column.field, planned.dump()),
        "planned " + column.text(planned.get<double>()));
  }
  return cell(fmt::format(R"( data-field="{}" data-value="{}")", column.field, value.dump()), text);
}

std::string parity_cell(const ordered_json& row, const ordered_json& data) {
  const auto [style, words] = parity_words(row);
  std::string text = fmt::format(R"(<span class="pill {}">{}</span>)", style, html_escaped(words));
  if (row.at("name") == data.at("baseline")) {
    text += R"( <span class="pill baseline">baseline</span>)";
  }
  if (data.at("classes").size() > 1) {
    text += below("", fmt::format("class {}", row.at("class").get<std::size_t>() + 1));
  }
  const std::string remark =
      row.at("state") == "failed" ? row.at("failure") : row.at("parity").at("text");
  return cell(fmt::format(R"( class="text" data-field="parity" title="{}")", html_escaped(remark)),
              text);
}

std::string loss_cell(const ordered_json& row) {
  const ordered_json& loss = row.at("last_loss");
  if (loss.is_null()) {
    return unknown_cell(row.at("rounds").get<int>() > 0 ? "not finite" : "not measured");
  }
  return cell(fmt::format(R"( data-field="last_loss" data-value="{}")", loss.dump()),
              fmt::format("{:.4f}", loss.get<double>()));
}

std::vector<Column> figure_columns(const ordered_json& rows) {
  const auto metric = [](const char* name) {
    return [name](const ordered_json& row) -> const ordered_json& {
      return row.at("metrics").at(name);
    };
  };
  const auto total = [](const ordered_json& bytes) -> const ordered_json& {
    return find(bytes, "total");
  };
  const auto none = [](const ordered_json& row) -> const ordered_json& { return find(row, ""); };
  const auto slower = [](const ordered_json& row) -> const ordered_json& {
    return row.at("speed").at("slower_percent");
  };
  const auto peak = [total](const ordered_json& row) -> const ordered_json& {
    return total(row.at("peak_bytes"));
  };
  const auto planned_peak = [total](const ordered_json& row) -> const ordered_json& {
    return total(find(row.at("planned"), "peak_bytes"));
  };
  const auto planned_sent = [](const ordered_json& row) -> const ordered_json& {
    return find(row.at("planned"), "sent_bytes");
  };
  std::vector<Column> columns = {
      {"step", "step_ms", kMs, 2, metric("step_ms"), none, "median", "q1", "q3"},
      {"slower", "slower_percent", kOfHundred, 1, slower, none, "median", "low", "high"},
      {"exposed", "exposed_comm_ms", kMs, 2, metric("exposed_comm_ms"), none, "median"},
      {"tokens/s", "tokens_per_s", kPlain, 0, metric("tokens_per_s"), none, "median"},
      {"peak", "peak_bytes", kBytes, 2, peak, planned_peak},
      {"sent", "sent_bytes", kBytes, 2, metric("sent_bytes"), planned_sent, "median"},
      {"overlap", "overlap", kPercent, 0, metric("overlap"), none, "median"},
  };
  for (Column& column : columns) column.fit(rows);
  return columns;
}

}  // namespace

ParityWords parity_words(const ordered_json& row) {
  const std::string state = row.at("state"), kind = row.at("parity").at("kind");
  if (state == "failed") return {"failed", "failed"};
  if (kind == "equal bits") return {"equal", kind};
  if (kind == "another training") return {"other", kind};
  if (kind == "within" || kind == "differs") {
    if (row.at("parity").at("first_step").is_null()) return {kind, "other parameters at the end"};
    const ordered_json& distance = row.at("parity").at("max_loss_difference");
    if (distance.is_null()) return {kind, "one is not finite"};
    const std::string amount = fmt::format("{:.2g}", distance.get<double>());
    return {kind, kind == "within" ? "up to " + amount + " apart" : "differs by " + amount};
  }
  return {"missing", state == "done" ? "no baseline" : "not trained"};
}

std::string report_table(const ordered_json& data, std::vector<std::string>& untold) {
  const ordered_json& rows = data.at("configurations");
  const std::vector<Column> columns = figure_columns(rows);
  const auto is_told = [&](const Column& column) {
    return std::ranges::any_of(
        rows, [&](const ordered_json& row) { return column.value(row).is_number(); });
  };
  const auto head_cell = [](const std::string& head, const char* style) {
    return fmt::format(R"(<th scope="col"{}>{}</th>)", style, html_escaped(head));
  };
  std::string head = head_cell("configuration", "") + head_cell("numbers", R"( class="text")") +
                     head_cell("last loss", "");
  std::size_t num_columns = 3;
  for (const Column& column : columns) {
    if (is_told(column)) {
      head += head_cell(column.head, "");
      ++num_columns;
    } else if (std::string_view(column.field) != "slower_percent") {
      untold.push_back(column.head.substr(0, column.head.find(',')));
    }
  }
  if (std::ranges::all_of(rows,
                          [](const ordered_json& row) { return row.at("planned").is_null(); })) {
    untold.emplace_back("what was planned");
  }
  const ordered_json& fastest = find(data.at("fastest"), "name");
  const ordered_json& as_fast = find(data.at("fastest"), "not_told_apart_from");
  std::string body;
  for (const ordered_json& row : rows) {
    const std::string name = row.at("name");
    body += fmt::format(R"(<tr><th scope="row">{}</th>)", html_escaped(name));
    if (const ordered_json& twin = row.at("same_plan_as"); !twin.is_null()) {
      body += fmt::format(
          R"(<td class="text unknown" colspan="{}">same plan as {}: its figures are those</td>)",
          num_columns - 1, html_escaped(twin.get<std::string>()));
    } else {
      const std::string reference = name != fastest   ? ""
                                    : as_fast.empty() ? "fastest"
                                                      : "reference";
      body += parity_cell(row, data) + loss_cell(row);
      for (const Column& column : columns) {
        if (is_told(column)) body += figure_cell(column, row, reference);
      }
    }
    body += "</tr>\n";
  }
  return fmt::format(
      R"(<table>
<thead><tr>{}</tr></thead>
<tbody>
{}</tbody>
</table>)",
      head, body);
}

}  // namespace tessera::tools

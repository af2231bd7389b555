#include "tools/compare/report_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/io/text.h"
#include "tools/compare/templates.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMaxPoints = 12000;  // of losses, in all
constexpr const char* kUnknown = R"(<td class="unknown" data-value="">not measured</td>)";
constexpr const char* kNotFinite = R"(<td class="unknown" data-value="">not finite</td>)";

// {{name}} each.
std::string filled(std::string_view page, const std::map<std::string, std::string>& values) {
  std::string result;
  while (!page.empty()) {
    const std::size_t begin = page.find("{{");
    result += page.substr(0, begin);
    if (begin == std::string_view::npos) break;
    const std::size_t end = page.find("}}", begin);
    result += values.at(std::string(page.substr(begin + 2, end - begin - 2)));
    page.remove_prefix(end + 2);
  }
  return result;
}

// JSON that no </script> or <!-- in a name can end.
std::string in_script(const ordered_json& value) {
  std::string result;
  for (const char c : value.dump(-1, ' ', true, ordered_json::error_handler_t::replace)) {
    if (c == '<') {
      result += "\\u003c";
    } else if (c == '>') {
      result += "\\u003e";
    } else {
      result += c;
    }
  }
  return result;
}

// As many digits as can be seen, and more.
ordered_json rounded(const ordered_json& value) {
  if (!value.is_number_float()) return value;
  return ordered_json::parse(fmt::format("{:.8g}", value.get<double>()));
}

// Of each stretch of steps the one with the largest difference, and always the first and the last.
ordered_json thinned(const ordered_json& losses, const ordered_json& differences,
                     std::size_t max_points) {
  const std::size_t num_steps = losses.size();
  const std::size_t stride = std::max<std::size_t>(1, (num_steps + max_points - 1) / max_points);
  ordered_json result = {{"step", ordered_json::array()},
                         {"loss", ordered_json::array()},
                         {"difference", ordered_json::array()}};
  const auto size_at = [&](std::size_t i) {
    if (i >= differences.size() || differences[i].is_null()) return HUGE_VAL;
    return differences[i].get<double>();
  };
  for (std::size_t begin = 0; begin < num_steps; begin += stride) {
    std::size_t best = begin;
    for (std::size_t i = begin; i < std::min(begin + stride, num_steps); ++i) {
      if (size_at(i) > size_at(best)) best = i;
    }
    if (begin == 0 && stride > 1) best = 0;
    if (begin + stride >= num_steps && stride > 1) best = num_steps - 1;
    result["step"].push_back(best + 1);
    result["loss"].push_back(rounded(losses[best]));
    result["difference"].push_back(best < differences.size() ? rounded(differences[best])
                                                             : ordered_json());
  }
  return result;
}

// The comparison as the page needs it: options once, and losses thinned.
ordered_json page_data(const ordered_json& comparison, const ordered_json& steps) {
  ordered_json data = comparison;
  const ordered_json base = comparison.at("configurations").at(0).at("options");
  data["options"] = base;
  data["streams"] = steps.at("streams");
  data["memory"] = steps.at("memory");
  ordered_json& rows = data["configurations"];  // behind the last field that is added
  const std::size_t max_points = std::clamp<std::size_t>(kMaxPoints / rows.size(), 20, 500);
  for (ordered_json& row : rows) {
    ordered_json changed = ordered_json::object();
    for (const auto& [key, value] : row["options"].items()) {
      if (!base.contains(key) || base[key] != value) changed[key] = value;
    }
    row["changed"] = std::move(changed);
    row["loss_points"] = nullptr;
    if (row["loss"].is_array() && row["loss_difference"].is_array()) {
      row["loss_points"] = thinned(row["loss"], row["loss_difference"], max_points);
    }
    row.erase("loss");
    row.erase("loss_difference");
    for (const char* untold : {"options", "overrides", "folder", "params_sha256"})
      row.erase(untold);
  }
  return data;
}

struct Figure {
  const char* field;
  const char* format;
  double unit = 1;
};

std::string number_text(const ordered_json& value, const Figure& figure) {
  return fmt::format(fmt::runtime(figure.format), value.get<double>() / figure.unit);
}

std::string number_cell(const ordered_json& value, const Figure& figure) {
  if (!value.is_number()) return kUnknown;
  return fmt::format(R"(<td data-field="{}" data-value="{}">{}</td>)", figure.field, value.dump(),
                     number_text(value, figure));
}

// What was planned stands below what was measured.
std::string number_cell(const ordered_json& value, const ordered_json& planned,
                        const Figure& figure) {
  std::string cell = number_cell(value, figure);
  if (!planned.is_number()) return cell;
  const std::string below = fmt::format(
      R"(<small class="below" data-field="planned_{}" data-value="{}">planned {}</small>)",
      figure.field, planned.dump(), number_text(planned, figure));
  return cell.insert(cell.rfind("</td>"), below);
}

std::string loss_cell(const ordered_json& row) {
  const ordered_json& loss = row.at("last_loss");
  if (loss.is_null() && row.at("rounds").get<int>() > 0) return kNotFinite;
  return number_cell(loss, {"last_loss", "{:.4f}"});
}

const ordered_json& median_of(const ordered_json& row, const char* metric) {
  static const ordered_json none;
  const ordered_json& spread = row.at("metrics").at(metric);
  return spread.is_null() ? none : spread.at("median");
}

const ordered_json& find(const ordered_json& object, const char* name) {
  static const ordered_json none;
  if (!object.is_object() || !object.contains(name)) return none;
  return object.at(name);
}

std::string parity_cell(const ordered_json& row, bool is_baseline) {
  const std::string state = row.at("state"), kind = row.at("parity").at("kind");
  std::string style = "missing", words = "missing";
  if (state == "failed") {
    style = words = "failed";
  } else if (kind == "equal bits") {
    style = "equal";
    words = kind;
  } else if (kind == "within" || kind == "differs") {
    const ordered_json& distance = row.at("parity").at("max_loss_difference");
    style = kind;
    if (row.at("parity").at("first_step").is_null()) {
      words = row.at("parity").at("equal_parameters").get<bool>() ? kind : "other parameters";
    } else {
      words = fmt::format("{} {}", kind,
                          distance.is_null() ? std::string("by what is not finite")
                                             : fmt::format("{:.2g}", distance.get<double>()));
    }
  } else if (state == "done") {
    words = "no baseline";
  }
  const std::string baseline =
      is_baseline ? R"( <span class="pill baseline">baseline</span>)" : std::string();
  const std::string remark = state == "failed" ? row.at("failure") : row.at("parity").at("text");
  return fmt::format(
      R"(<td class="text" data-field="parity" title="{}"><span class="pill {}">{}</span>{}</td>)",
      html_escaped(remark), style, html_escaped(words), baseline);
}

std::string step_cell(const ordered_json& row) {
  const ordered_json& spread = row.at("metrics").at("step_ms");
  if (spread.is_null()) return kUnknown;
  return fmt::format(
      R"(<td data-field="step_ms" data-value="{}">{:.2f}<small class="below">{:.2f} to {:.2f}</small></td>)",
      spread.at("median").dump(), spread.at("median").get<double>(), spread.at("q1").get<double>(),
      spread.at("q3").get<double>());
}

// The table, and in `untold` the columns without a single figure, which are left out.
std::string table(const ordered_json& data, std::vector<std::string>& untold) {
  constexpr double kMiB = 1 << 20;
  const std::vector<std::string> heads = {"configuration", "numbers",     "last loss",
                                          "step, ms",      "exposed, ms", "tokens/s",
                                          "peak, MiB",     "sent, MiB",   "overlap, %"};
  std::vector<std::vector<std::string>> rows;
  for (const ordered_json& row : data.at("configurations")) {
    const std::string name = row.at("name");
    const ordered_json& planned = row.at("planned");
    rows.push_back({
        fmt::format(R"(<th scope="row">{}</th>)", html_escaped(name)),
        parity_cell(row, name == data.at("baseline")),
        loss_cell(row),
        step_cell(row),
        number_cell(median_of(row, "exposed_comm_ms"), {"exposed_comm_ms", "{:.2f}"}),
        number_cell(median_of(row, "tokens_per_s"), {"tokens_per_s", "{:.0f}"}),
        number_cell(find(row.at("peak_bytes"), "total"), find(find(planned, "peak_bytes"), "total"),
                    {"peak_bytes", "{:.2f}", kMiB}),
        number_cell(median_of(row, "sent_bytes"), find(planned, "sent_bytes"),
                    {"sent_bytes", "{:.2f}", kMiB}),
        number_cell(median_of(row, "overlap"), {"overlap", "{:.0f}", 0.01}),
    });
  }
  std::vector<bool> told(heads.size(), false);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) told[i] = told[i] || row[i] != kUnknown;
  }
  std::string head, body;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    if (!told[i]) untold.push_back(heads[i].substr(0, heads[i].find(',')));
    if (told[i]) {
      head +=
          fmt::format(R"(<th scope="col"{}>{}</th>)", i == 1 ? R"( class="text")" : "", heads[i]);
    }
  }
  if (std::ranges::all_of(data.at("configurations"),
                          [](const ordered_json& row) { return row.at("planned").is_null(); })) {
    untold.emplace_back("what was planned");
  }
  for (const auto& row : rows) {
    body += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i) body += told[i] ? row[i] : "";
    body += "</tr>\n";
  }
  return fmt::format("<table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}</tbody>\n</table>", head,
                     body);
}

// "4", or "1 to 4" if configurations differ in what `value` says of them.
std::string range_text(const ordered_json& rows, const char* format, auto value) {
  const auto text = [&](double number) { return fmt::format(fmt::runtime(format), number); };
  double least = value(rows.at(0)), most = least;
  for (const ordered_json& row : rows) {
    least = std::min<double>(least, value(row));
    most = std::max<double>(most, value(row));
  }
  return text(least) == text(most) ? text(least) : fmt::format("{} to {}", text(least), text(most));
}

std::string facts(const ordered_json& data) {
  const ordered_json& rows = data.at("configurations");
  const auto of_all = [&](const char* field) {
    return range_text(rows, "{:.0f}",
                      [&](const ordered_json& row) { return row.at(field).get<double>(); });
  };
  const auto of_models = [&](const char* field, const char* format = "{:.0f}", double unit = 1) {
    return range_text(rows, format, [&](const ordered_json& row) {
      return row.at("model").at(field).get<double>() / unit;
    });
  };
  const std::string ranks = of_all("ranks");
  std::vector<std::string> words = {
      fmt::format("{} M parameters, {} layers × {}", of_models("parameters", "{:.2f}", 1e6),
                  of_models("layers"), of_models("dim")),
      fmt::format("{} rank{}", ranks, ranks == "1" ? "" : "s"),
      fmt::format("{} steps, {} of them warm-up", of_all("steps"),
                  data.at("warmup_steps").get<std::int64_t>()),
      fmt::format("{} round{}", data.at("rounds").get<int>(),
                  data.at("rounds").get<int>() == 1 ? "" : "s in turn")};
  for (const ordered_json& device : data.at("devices")) words.push_back(device);
  std::string items;
  for (const std::string& word : words) items += "<li>" + html_escaped(word) + "</li>";
  return items;
}

std::string verdict_text(const ordered_json& lines) {
  std::vector<std::string> escaped;
  for (const ordered_json& line : lines) escaped.push_back(html_escaped(line.get<std::string>()));
  return engine::join(escaped, "<br>");
}

// Its class, and a word or two.
std::pair<std::string, std::string> status_of(const ordered_json& data) {
  const auto any = [&](const char* field, const char* inner, const char* value) {
    return std::ranges::any_of(data.at("configurations"), [&](const ordered_json& row) {
      return (inner == nullptr ? row.at(field) : row.at(field).at(inner)) == value;
    });
  };
  if (any("parity", "kind", "differs")) return {"failed", "Parity fails"};
  if (any("state", nullptr, "failed")) return {"failed", "A training failed"};
  if (!data.at("verdict").at("complete").get<bool>()) return {"open", "Not complete"};
  return {"passed", "Parity holds"};
}

}  // namespace

std::string html_escaped(std::string_view text) {
  std::string result;
  for (const char c : engine::escaped(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string report_page(const ordered_json& comparison, const ordered_json& steps) {
  const ordered_json data = page_data(comparison, steps);
  const ordered_json& verdict = data.at("verdict");
  const auto [status, badge] = status_of(data);
  std::vector<std::string> untold;
  const std::string rows = table(data, untold);
  return filled(
      kReportHtml,
      {{"title", html_escaped(fmt::format("Tessera: {} configurations compared",
                                          data.at("configurations").size()))},
       {"style", std::string(kReportCss)},
       {"script", std::string(kReportScript)},
       {"status", status},
       {"badge", badge},
       {"verdict", verdict_text(verdict.at("lines"))},
       {"facts", facts(data)},
       {"lead",
        "Medians over all steps but the warm-up, with the range of the middle half of them below. "
        "Memory and bytes are those of rank 0. Press a heading to sort."},
       {"note", untold.empty() ? ""
                               : html_escaped("Not measured in any of these runs: " +
                                              engine::join(untold, ", ") + ".")},
       {"table", rows},
       {"data", in_script(data)}});
}

}  // namespace tessera::tools

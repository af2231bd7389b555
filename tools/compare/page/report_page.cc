#include "tools/compare/page/report_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/io/text.h"
#include "tools/compare/page/report_table.h"
#include "tools/compare/page/templates.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMaxPoints = 12000;  // of losses, in all

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

// Names of slices once: configurations launch the same operations.
void share_names(ordered_json& data) {
  std::map<std::string, std::size_t> numbers;
  ordered_json& names = data["slice_names"];
  for (ordered_json& step : data["drawn"]) {
    const ordered_json own = step.at("slices");
    step.erase("slices");
    for (ordered_json& thread : step["threads"]) {
      for (ordered_json& slice : thread["slices"]) {
        const std::string name = own.at(slice[2].get<std::size_t>());
        const auto [number, is_new] = numbers.try_emplace(name, names.size());
        if (is_new) names.push_back(name);
        slice[2] = number->second;
      }
    }
  }
}

// The comparison as the page needs it: options once, and losses thinned.
ordered_json page_data(const ordered_json& comparison, const ordered_json& steps) {
  ordered_json data = comparison;
  const ordered_json base = comparison.at("configurations").at(0).at("options");
  data["options"] = base;
  data["streams"] = steps.at("streams");
  data["slice_names"] = ordered_json::array();
  data["drawn"] = steps.at("steps");
  share_names(data);
  ordered_json& rows = data["configurations"];  // after the last field that is added
  const std::size_t max_points = std::clamp<std::size_t>(kMaxPoints / rows.size(), 20, 500);
  for (ordered_json& row : rows) {
    ordered_json changed = ordered_json::object();
    for (const auto& [key, value] : row["options"].items()) {
      if (!base.contains(key) || base[key] != value) changed[key] = value;
    }
    row["changed"] = std::move(changed);
    row["numbers"] = parity_words(row).words;
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
      data.at("made_by").at("begun"),
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

// The class of the status, and a headline of two or three words.
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

// Lines break between words alone, not at the hyphens of --rounds and 1e-3.
std::string unbroken(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool breaks = word.find('-') != std::string::npos && word.size() < 30;
    words.push_back(breaks ? "<span class=\"word\">" + word + "</span>" : word);
    begin = end + 1;
  }
  return engine::join(words, " ");
}

// A paragraph for each line, without the words of the headline.
std::string verdict_text(const ordered_json& data, const std::string& headline) {
  std::string text;
  for (std::string line : data.at("verdict").at("lines")) {
    const std::string repeated = headline + ": ";
    const bool repeats = line.starts_with(repeated);
    if (repeats) line.erase(0, repeated.size());
    const bool is_name = std::ranges::any_of(data.at("configurations"), [&](const auto& row) {
      return line.starts_with(row.at("name").template get<std::string>());
    });
    if (repeats && !is_name && !line.empty()) line[0] = char(std::toupper(line[0]));
    text += "<p>" + unbroken(html_escaped(line)) + "</p>\n";
  }
  return text;
}

std::string source_text(const ordered_json& commit) {
  if (commit.is_null()) return "not known: it was not started by bazel run in a git checkout";
  return fmt::format(
      "commit {}{}", commit.at("id").get<std::string>(),
      commit.at("changed").get<bool>() ? ", with changes that are not committed" : "");
}

// What the figures mean nothing without: pairs of a list.
std::string made_text(const ordered_json& data) {
  const ordered_json& made = data.at("made_by");
  std::string text;
  const auto add = [&](const char* what, const std::string& words) {
    text += fmt::format("<dt>{}</dt><dd>{}</dd>\n", what, words);
  };
  add("begun", html_escaped(made.at("begun").get<std::string>()));
  add("command", "<code>" + html_escaped(made.at("command").get<std::string>()) + "</code>");
  add("source", source_text(made.at("commit")));
  add("compiler", html_escaped(made.at("compiler").get<std::string>()));
  std::string machine = made.at("cpu").get<std::string>();
  const std::int64_t usable = made.at("usable_cores");
  machine += made.at("cores").is_null() ? fmt::format(", {} usable cores", usable)
                                        : fmt::format(", {} of {} cores usable", usable,
                                                      made.at("cores").get<std::int64_t>());
  if (const ordered_json& nbytes = made.at("memory_bytes"); !nbytes.is_null()) {
    machine += fmt::format(", {:.1f} GiB of memory", nbytes.get<double>() / 0x1p30);
  }
  add("machine", html_escaped(machine));
  for (const ordered_json& device : data.at("devices")) {
    add("trained on", html_escaped(device.get<std::string>()));
  }
  if (const ordered_json& load = made.at("load"); !load.is_null()) {
    const double before = load.at(0).get<double>();
    add("load at the start",
        fmt::format("{:.2f} over 1 minute, {:.2f} over 5, {:.2f} over 15{}", before,
                    load.at(1).get<double>(), load.at(2).get<double>(),
                    before > 0.5 * double(usable)
                        ? "; other programs ran, so times are longer than they need be"
                        : ""));
  }
  if (const std::int64_t num_kept = made.at("kept_trainings"); num_kept > 0) {
    add("resumed", fmt::format("{} trainings are kept of an earlier start", num_kept));
  }
  for (const auto& [why, count] : made.at("made_again").items()) {
    const auto number = count.get<std::int64_t>();
    add("made again", fmt::format("{} training{} of an earlier start: {}", number,
                                  number == 1 ? "" : "s", html_escaped(why)));
  }
  return text;
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
  const auto [status, headline] = status_of(data);
  std::vector<std::string> untold;
  const std::string rows = report_table(data, untold);
  std::string lead =
      "Medians over all steps but the warm-up, with the range of the middle half of them below. "
      "Memory and bytes are those of rank 0.";
  std::string note;
  if (!untold.empty())
    note = "Not measured in any of these runs: " + engine::join(untold, ", ") + ". ";
  if (!data.at("fastest").is_null()) {
    lead +=
        " Slower: than the one with the most tokens/s, round by round, and within which bounds.";
  } else if (!data.at("rounds_needed").is_null()) {
    note += fmt::format("Too few rounds to say which is faster: it takes --rounds={}.",
                        data.at("rounds_needed").get<int>());
  }
  return filled(kReportHtml,
                {{"title", html_escaped(fmt::format("Tessera: {} configurations compared",
                                                    data.at("configurations").size()))},
                 {"style", std::string(kReportCss)},
                 {"script", std::string(kReportScript)},
                 {"status", status},
                 {"headline", headline},
                 {"verdict", verdict_text(data, headline)},
                 {"facts", facts(data)},
                 {"lead", lead},
                 {"note", html_escaped(note)},
                 {"table", rows},
                 {"made", made_text(data)},
                 {"data", in_script(data)}});
}

}  // namespace tessera::tools

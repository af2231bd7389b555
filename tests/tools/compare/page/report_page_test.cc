// The page without a browser: well-formed, complete, and safe whatever the names are.
#include "tools/compare/page/report_page.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/tools/compare/page/sample_comparison.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::has;
using testing::no_steps;
using testing::sample_comparison;
using testing::sample_steps;

/// The first tag that is closed by another, or never; empty: none. What is in script and style is
/// text.
std::string unbalanced_tag(const std::string& page) {
  const std::set<std::string> empty = {"meta", "img", "br", "!doctype", "link", "hr", "input"};
  std::vector<std::string> open;
  for (std::size_t at = 0; (at = page.find('<', at)) != std::string::npos;) {
    const bool closes = page[at + 1] == '/';
    std::size_t end = at + 1 + (closes ? 1 : 0);
    std::string name;
    while (std::isalnum(static_cast<unsigned char>(page[end])) != 0 || page[end] == '!') {
      name += static_cast<char>(std::tolower(page[end++]));
    }
    for (char quote = 0; page[end] != '>' || quote != 0; ++end) {
      if (end + 1 >= page.size()) return "a tag without end: " + name;
      if (page[end] == '"') quote = quote == 0 ? '"' : 0;
    }
    const bool ends_itself = page[end - 1] == '/';
    at = end + 1;
    if (closes) {
      if (open.empty() || open.back() != name) return "/" + name;
      open.pop_back();
    } else if (!empty.contains(name) && !ends_itself) {
      open.push_back(name);
      if (name == "script" || name == "style") at = page.find("</" + name, at);
    }
  }
  return open.empty() ? "" : open.back();
}

std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const std::size_t at = text.find(begin);
  if (at == std::string::npos) return "";
  return text.substr(at + begin.size(), text.find(end, at + begin.size()) - at - begin.size());
}

TEST(ReportPage, IsWellFormedAndHoldsEveryFigure) {
  const ordered_json data = sample_comparison();
  const std::string page = report_page(data, sample_steps());
  EXPECT_EQ(unbalanced_tag(page), "");
  EXPECT_TRUE(page.starts_with("<!doctype html>"));
  EXPECT_FALSE(has(page, {"{{"}));
  const std::string table = between(page, "<table", "</table>");
  for (const ordered_json& row : data.at("configurations")) {
    EXPECT_TRUE(has(table, {html_escaped(row.at("name").get<std::string>())}));
    for (const auto& [field, value] :
         {std::pair{"last_loss", row.at("last_loss")},
          std::pair{"step_ms", row.at("metrics").at("step_ms").at("median")},
          std::pair{"exposed_comm_ms", row.at("metrics").at("exposed_comm_ms").at("median")},
          std::pair{"tokens_per_s", row.at("metrics").at("tokens_per_s").at("median")},
          std::pair{"overlap", row.at("metrics").at("overlap").at("median")},
          std::pair{"sent_bytes", row.at("metrics").at("sent_bytes").at("median")},
          std::pair{"planned_sent_bytes", row.at("planned").at("sent_bytes")},
          std::pair{"peak_bytes", row.at("peak_bytes").at("total")}}) {
      EXPECT_TRUE(has(table, {std::string("data-field=\"") + field + "\" data-value=\"" +
                              testing::json_text(value) + "\""}))
          << field;
    }
  }
  // What the charts are drawn from is compare.json.
  const ordered_json drawn =
      testing::parse_ordered_json(between(page, "id=\"data\">", "</script>"));
  EXPECT_EQ(drawn.at("streams"), sample_steps().at("streams"));
  ordered_json steps = sample_steps().at("steps");
  EXPECT_EQ(drawn.at("slice_names"), steps[1].at("slices"));
  for (ordered_json& step : steps) step.erase("slices");
  EXPECT_EQ(drawn.at("drawn"), steps);
  EXPECT_EQ(drawn.at("fastest"), data.at("fastest"));
  for (std::size_t i = 0; i < 4; ++i) {
    const ordered_json &mine = drawn.at("configurations")[i],
                       &theirs = data.at("configurations")[i];
    for (const char* field :
         {"name", "metrics", "step_parts_ms", "peak_bytes", "planned", "parity"}) {
      EXPECT_EQ(mine.at(field), theirs.at(field)) << field;
    }
    EXPECT_EQ(mine.at("loss_points").at("loss"), theirs.at("loss"));
    EXPECT_EQ(mine.at("loss_points").at("difference"), theirs.at("loss_difference"));
  }
}

TEST(ReportPage, NeedsNothingElse) {
  const std::string page = report_page(sample_comparison(), sample_steps());
  for (const char* other : {"src=", "@import", "url(", "fetch(", "XMLHttpRequest", "<link"}) {
    std::string code = page;
    const std::string name = "src=x onerror";  // the planted name
    for (std::size_t at; (at = code.find(name)) != std::string::npos;) code.erase(at, name.size());
    EXPECT_FALSE(has(code, {other})) << other;
  }
  EXPECT_TRUE(has(page, {"default-src 'none'"}));
}

TEST(ReportPage, NamesAreTextAndNothingElse) {
  EXPECT_EQ(html_escaped("<a b='c' d=\"e\">&\n"),
            "&lt;a b=&#39;c&#39; d=&quot;e&quot;&gt;&amp;\\n");
  const std::string page = report_page(sample_comparison(), sample_steps());
  EXPECT_FALSE(has(page, {"<img"}));
  EXPECT_FALSE(has(page, {"<b>"}));
  EXPECT_TRUE(has(page, {"&lt;b&gt;zero3&lt;/b&gt; &amp; more.", "A &lt;fast&gt; one"}));
  EXPECT_TRUE(has(page, {"\\u003c/script\\u003e"}));
}

TEST(ReportPage, SaysWhatIsHeldThroughoutAStep) {
  const std::string page = report_page(sample_comparison(), sample_steps());
  EXPECT_FALSE(has(page, {"parameters come and go"}));
  EXPECT_TRUE(has(page, {"held throughout", "activations grow through forward"}));
}

TEST(ReportPage, WhatWasNotMeasuredIsNeverZero) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) {
    row["metrics"]["overlap"] = nullptr;
    row["planned"] = nullptr;
  }
  data["configurations"][1]["metrics"]["sent_bytes"] = nullptr;
  const std::string page = report_page(data, no_steps());
  EXPECT_FALSE(has(between(page, "<table", "</table>"), {"overlap"}));
  EXPECT_TRUE(has(page, {"Not measured in any of these runs: overlap, what was planned."}));
  EXPECT_TRUE(has(between(page, "<table", "</table>"), {"data-value=\"\">not measured</td>"}));
}

TEST(ReportPage, ALossThatIsNotFiniteWasMeasured) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) row["last_loss"] = nullptr;
  data["configurations"][1]["rounds"] = 0;
  const std::string page = report_page(data, no_steps()),
                    table = between(page, "<table", "</table>");
  EXPECT_TRUE(has(table, {"<td class=\"unknown\" data-value=\"\">not finite</td>",
                          "<td class=\"unknown\" data-value=\"\">not measured</td>"}));
  EXPECT_FALSE(has(page, {"Not measured in any of these runs"}));
}

/// What a row of the table says: its cells, without tags.
std::vector<std::string> cells_of(const std::string& page, const std::string& name) {
  const std::string table = between(page, "<table", "</table>");
  std::string row = between(table, "scope=\"row\">" + name + "</th>", "</tr>");
  std::vector<std::string> cells;
  for (std::size_t end; (end = row.find("</td>")) != std::string::npos; row.erase(0, end + 5)) {
    std::string text;
    bool in_tag = false;
    for (const char c : row.substr(0, end)) {
      if (c == '<' && !text.empty() && text.back() != ' ') text += ' ';
      in_tag = c == '<' || (in_tag && c != '>');
      if (!in_tag && c != '>') text += c;
    }
    while (text.ends_with(' ')) text.pop_back();
    cells.push_back(text);
  }
  return cells;
}
using Cells = std::vector<std::string>;

// By hand from sample_comparison().
TEST(ReportPage, TheTableTellsFiguresInTheirUnits) {
  ordered_json data = sample_comparison();
  std::string page = report_page(data, no_steps());
  EXPECT_EQ(cells_of(page, "ddp prefetch=2"),
            (Cells{"equal bits", "3.5750", "36.36 32.73 to 40.00", "25.0 20.0 to 30.0", "4.40",
                   "33,000", "16.21 planned 17.21", "4.20 planned 3.81", "80"}));
  EXPECT_EQ(cells_of(page, "ddp prefetch=0").front(), "equal bits  baseline");
  for (const char* head : {">step, ms<", ">slower, %<", ">exposed, ms<", ">tokens/s<",
                           ">peak, MiB<", ">sent, MiB<", ">overlap, %<"}) {
    EXPECT_TRUE(has(page, {head}));
  }
  const std::string last = html_escaped(data["configurations"][3]["name"].get<std::string>());
  EXPECT_EQ(cells_of(page, last).front(), "differs by 0.001");
  EXPECT_EQ(cells_of(page, last)[3], "reference") << "two others may be as fast";
  data["fastest"]["not_told_apart_from"] = ordered_json::array();
  EXPECT_EQ(cells_of(report_page(data, no_steps()), last)[3], "fastest");

  // Larger ones: units and digits are those of the largest.
  for (ordered_json& row : data["configurations"]) {
    for (const char* field : {"median", "q1", "q3"}) {
      ordered_json& ms = row["metrics"]["step_ms"][field];
      ms = ms.get<double>() * 1000;
    }
    row["peak_bytes"]["total"] = row["peak_bytes"]["total"].get<double>() * 1000;
    row["planned"] = nullptr;
    row["metrics"]["sent_bytes"]["median"] = 300;
    row["metrics"]["exposed_comm_ms"]["median"] = 234.56;
  }
  page = report_page(data, no_steps());
  EXPECT_EQ(cells_of(page, "ddp prefetch=2"),
            (Cells{"equal bits", "3.5750", "36.36 32.73 to 40.00", "25.0 20.0 to 30.0", "234.6",
                   "33,000", "15.83", "300", "80"}));
  EXPECT_TRUE(has(page, {">step, s<", ">peak, GiB<", ">sent, B<", "what was planned."}));
}

TEST(ReportPage, SaysWhatTheNumbersAreNextToTheirReference) {
  const auto words = [](auto change) {
    ordered_json data = sample_comparison();
    change(data);
    return cells_of(report_page(data, no_steps()), "ddp prefetch=2");
  };
  const auto parity = [](const char* kind, double distance, const ordered_json& step) {
    return [=](ordered_json& data) {
      ordered_json& p = data["configurations"][1]["parity"];
      p["kind"] = kind;
      p["max_loss_difference"] = std::isfinite(distance) ? ordered_json(distance) : ordered_json();
      p["first_step"] = step;
    };
  };
  EXPECT_EQ(words(parity("within", 0.00187, 2)).front(), "up to 0.0019 apart");
  EXPECT_EQ(words(parity("differs", 0.2, 2)).front(), "differs by 0.2");
  EXPECT_EQ(words(parity("differs", HUGE_VAL, 2)).front(), "one is not finite");
  EXPECT_EQ(words(parity("differs", 0, nullptr)).front(), "other parameters at the end");
  EXPECT_EQ(words(parity("another training", 1, 1)).front(), "another training");
  // Of several classes each row says which is its own.
  const Cells classed = words([](ordered_json& data) {
    data["classes"].push_back(data["classes"][0]);
    data["configurations"][1]["class"] = 1;
  });
  EXPECT_EQ(classed.front(), "equal bits class 2");
  // What has the plan of another was not trained.
  const Cells twin = words(
      [](ordered_json& data) { data["configurations"][1]["same_plan_as"] = "ddp prefetch=0"; });
  EXPECT_EQ(twin, Cells{"same plan as ddp prefetch=0: its figures are those"});
}

TEST(ReportPage, SaysWhichRoundsWouldTellTheFastest) {
  ordered_json data = sample_comparison();
  data["fastest"] = nullptr;
  for (ordered_json& row : data["configurations"]) row["speed"]["slower_percent"] = nullptr;
  const std::string page = report_page(data, no_steps());
  EXPECT_TRUE(has(page, {"Too few rounds to say which is faster: it takes --rounds=8."}));
  EXPECT_FALSE(has(between(page, "<table", "</table>"), {"slower"}));
}

TEST(ReportPage, SaysHowItWasMade) {
  ordered_json data = sample_comparison();
  const auto made = [&] {
    return between(report_page(data, no_steps()), "class=\"made\">", "</dl>");
  };
  for (const std::string& pair :
       {std::string("begun</dt><dd>2026-11-26 01:02:03 UTC<"),
        std::string("command</dt><dd><code>bazel run //tools:compare -- "
                    "&#39;--sweep=a=&lt;1&gt;,2&#39;</code><"),
        "source</dt><dd>commit " + std::string(40, 'c') + ", with changes that are not committed<",
        std::string("compiler</dt><dd>GCC 12.2.0, optimised<"),
        std::string("machine</dt><dd>A &lt;fast&gt; one, 2 of 16 cores usable, 3.0 GiB of memory<"),
        std::string("trained on</dt><dd>cpu, v3<"),
        std::string("load at the start</dt><dd>1.25 over 1 minute, 0.50 over 5, 0.25 over 15; "
                    "other programs ran, so times are longer than they need be<"),
        std::string("resumed</dt><dd>3 trainings are kept of an earlier start<"),
        std::string("made again</dt><dd>2 trainings of an earlier start: "
                    "the &lt;data&gt; have changed<")}) {
    EXPECT_TRUE(has(made(), {pair}));
  }
  EXPECT_TRUE(has(report_page(data, no_steps()), {"<li>2026-11-26 01:02:03 UTC</li>"}));
  data["made_by"]["commit"]["changed"] = false;
  data["made_by"]["load"] = {1.0, 9.0, 9.0};
  data["made_by"]["kept_trainings"] = 0;
  data["made_by"]["made_again"] = ordered_json::object();
  EXPECT_FALSE(has(made(), {"changes"}));
  EXPECT_FALSE(has(made(), {"other programs"}));
  EXPECT_FALSE(has(made(), {"resumed"}));
  EXPECT_FALSE(has(made(), {"made again"}));
  data["made_by"]["commit"] = nullptr;
  data["made_by"]["load"] = nullptr;
  EXPECT_TRUE(has(made(), {"source</dt><dd>not known"}));
  EXPECT_FALSE(has(made(), {"load at"}));
}

TEST(ReportPage, TheVerdictIsAHeadlineAndPlainLines) {
  ordered_json data = sample_comparison();
  const auto verdict = [&] { return between(report_page(data, no_steps()), "<h1>", "</div>"); };
  EXPECT_EQ(verdict(),
            "Parity fails</h1>\n<p>&lt;b&gt;zero3&lt;/b&gt; &amp; more.</p>\n"
            "<p>Fastest: ddp with 33,000 tokens/s; run more "
            "<span class=\"word\">--rounds.</span></p>\n\n");
  data["configurations"][3]["parity"]["kind"] = "equal bits";
  data["verdict"]["lines"] = {"Parity holds: all 4 agree.", "Parity holds: ddp prefetch=0 agrees."};
  EXPECT_EQ(verdict(), "Parity holds</h1>\n<p>All 4 agree.</p>\n<p>ddp prefetch=0 agrees.</p>\n\n");
}

TEST(ReportPage, SaysHowItStands) {
  ordered_json data = sample_comparison();
  const auto badge = [&] { return between(report_page(data, no_steps()), "<h1>", "<"); };
  EXPECT_EQ(badge(), "Parity fails");
  data["configurations"][3]["parity"]["kind"] = "within";
  EXPECT_EQ(badge(), "Parity holds");
  data["configurations"][3]["state"] = "missing";
  data["verdict"]["complete"] = false;
  EXPECT_EQ(badge(), "Not complete");
  data["configurations"][3]["state"] = "failed";
  EXPECT_EQ(badge(), "A training failed");
}

TEST(ReportPage, StaysSmallAndKeepsTheLargestDifference) {
  ordered_json data = sample_comparison(20000);
  const ordered_json row = data["configurations"][3];
  while (data["configurations"].size() < 64) data["configurations"].push_back(row);
  const std::string page = report_page(data, no_steps());
  EXPECT_LT(page.size(), 2'000'000u);
  const ordered_json drawn =
      testing::parse_ordered_json(between(page, "id=\"data\">", "</script>"));
  const ordered_json points = drawn["configurations"][3]["loss_points"];
  EXPECT_EQ(points["step"].front(), 1);
  EXPECT_EQ(points["step"].back(), 20000);
  std::size_t at = 0;
  while (at + 1 < points["difference"].size() && points["difference"][at] == 0.0) ++at;
  EXPECT_EQ(points["difference"][at], 1e-3);
  EXPECT_EQ(points["step"][at], 10001);
}

// As many configurations as there can be, and of everything as much as is ever drawn.
TEST(ReportPage, StaysSmallWithAllThatThereCanBe) {
  ordered_json data = sample_comparison(3000);
  ordered_json row = data["configurations"][3];
  for (std::size_t i = 0; i < row["loss"].size(); ++i) {
    row["loss"][i] = 3 + 1 / (3.0 + static_cast<double>(i));
    row["loss_difference"][i] = 1e-7 / (7.0 + static_cast<double>(i));
  }
  data["configurations"] = ordered_json::array();
  while (data["configurations"].size() < 256) data["configurations"].push_back(row);
  ordered_json steps = no_steps();
  ordered_json slices = ordered_json::array(), names = ordered_json::array();
  for (int i = 0; i < 125; ++i) slices.push_back({i + 0.123456, 0.123456, i % 100});
  for (int i = 0; i < 100; ++i) names.push_back(std::string(40, 'n'));
  ordered_json memory = sample_steps().at("steps")[1];
  for (const char* category : {"optimizer", "activation", "gradient", "parameter_shard",
                               "gathered_parameter", "communication", "workspace"}) {
    memory["memory"]["bytes"][category] = std::vector<std::int64_t>(64, 1'234'567'890);
  }
  memory["memory"]["total"] = std::vector<std::int64_t>(64, 1'234'567'890);
  memory["memory"]["ms"] = std::vector<double>(64, 123.456789);
  for (int i = 0; i < 7; ++i) memory["terms"].push_back(memory["terms"][0]);
  memory["slices"] = names;
  memory["threads"] = {{{"name", "compute"}, {"slices", slices}}};
  while (steps["steps"].size() < 64) steps["steps"].push_back(memory);
  EXPECT_LT(report_page(data, steps).size(), 2'000'000u);
}

}  // namespace
}  // namespace tessera::tools

// The page without a browser: well-formed, complete, and safe whatever the names are.
#include "tools/compare/report_page.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/tools/compare/sample_comparison.h"

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
  const std::string table = between(page, "<table>", "</table>");
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
      EXPECT_TRUE(has(
          table, {std::string("data-field=\"") + field + "\" data-value=\"" + value.dump() + "\""}))
          << field;
    }
  }
  // What the charts are drawn from is compare.json.
  const ordered_json drawn = ordered_json::parse(between(page, "id=\"data\">", "</script>"));
  EXPECT_EQ(drawn.at("streams"), sample_steps().at("streams"));
  EXPECT_EQ(drawn.at("memory"), sample_steps().at("memory"));
  EXPECT_EQ(drawn.at("fastest"), data.at("fastest"));
  for (std::size_t i = 0; i < 4; ++i) {
    const ordered_json &mine = drawn.at("configurations")[i],
                       &theirs = data.at("configurations")[i];
    for (const char* field :
         {"name", "metrics", "step_parts_ms", "peak_bytes", "planned", "theory", "parity"}) {
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
  EXPECT_TRUE(has(page, {"&lt;b&gt;zero3&lt;/b&gt; &amp; more."}));
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
  EXPECT_FALSE(has(between(page, "<table>", "</table>"), {"overlap"}));
  EXPECT_TRUE(has(page, {"Not measured in any of these runs: overlap, what was planned."}));
  EXPECT_TRUE(has(between(page, "<table>", "</table>"), {"data-value=\"\">not measured</td>"}));
}

TEST(ReportPage, ALossThatIsNotFiniteWasMeasured) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) row["last_loss"] = nullptr;
  data["configurations"][1]["rounds"] = 0;
  const std::string page = report_page(data, no_steps()),
                    table = between(page, "<table>", "</table>");
  EXPECT_TRUE(has(table, {"<td class=\"unknown\" data-value=\"\">not finite</td>",
                          "<td class=\"unknown\" data-value=\"\">not measured</td>"}));
  EXPECT_FALSE(has(page, {"Not measured in any of these runs"}));
}

TEST(ReportPage, SaysHowItStands) {
  ordered_json data = sample_comparison();
  const auto badge = [&] {
    return between(report_page(data, no_steps()), "class=\"badge\">", "<");
  };
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
  const ordered_json drawn = ordered_json::parse(between(page, "id=\"data\">", "</script>"));
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
  ordered_json slices = ordered_json::array();
  for (int i = 0; i < 1500; ++i) slices.push_back({i + 0.123456, 0.123456, std::string(60, 'n')});
  while (steps["streams"].size() < 2) {
    steps["streams"].push_back({{"name", "zero3"},
                                {"source", "plan"},
                                {"duration_ms", 2000},
                                {"left_out", 5},
                                {"threads", {{{"name", "compute"}, {"slices", slices}}}}});
  }
  ordered_json memory = sample_steps().at("memory")[1];
  for (const char* category : {"optimizer", "activation", "gradient", "parameter_shard",
                               "gathered_parameter", "communication", "workspace"}) {
    memory["memory"]["bytes"][category] = std::vector<std::int64_t>(64, 1'234'567'890);
  }
  memory["memory"]["total"] = std::vector<std::int64_t>(64, 1'234'567'890);
  memory["memory"]["ms"] = std::vector<double>(64, 123.456789);
  for (int i = 0; i < 7; ++i) memory["terms"].push_back(memory["terms"][0]);
  while (steps["memory"].size() < 64) steps["memory"].push_back(memory);
  EXPECT_LT(report_page(data, steps).size(), 2'000'000u);
}

}  // namespace
}  // namespace tessera::tools

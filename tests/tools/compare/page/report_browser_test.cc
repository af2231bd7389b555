// The page in headless Chromium: drawn without an error, wide and narrow, light and dark, by
// keyboard, with the figures of compare.json. Fails where there is no Chromium.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/compare/page/report_browser.h"
#include "tests/tools/compare/page/sample_comparison.h"
#include "tests/tools/compare/tiny_comparison.h"
#include "tools/compare/page/report_page.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::Outcome;
using testing::run_program;
using testing::sample_comparison;
using testing::sample_steps;

TEST_F(Browser, DrawsTheFiguresOfTheJsonWithoutAnError) {
  const ordered_json data = sample_comparison();
  const std::string page = drawn(data, sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "drawn"), "yes");
  EXPECT_EQ(attribute(page, "hidden"), "");
  EXPECT_EQ(attribute(page, "images"), "0") << "a name became an element";
  EXPECT_EQ(attribute(page, "overflows"), "false");
  EXPECT_EQ(attribute(page, "dark"), "false");
  EXPECT_EQ(marks(page, "memory", "parameters"), of_rows(data, peak("parameter_shard")));
  EXPECT_EQ(marks(page, "memory", "gathered parameters"),
            of_rows(data, peak("gathered_parameter")));
  EXPECT_EQ(marks(page, "memory", "activations"), of_rows(data, peak("activation")));
  EXPECT_EQ(marks(page, "memory", "peak"), of_rows(data, peak("total")));
  EXPECT_EQ(marks(page, "time", "forward and backward"), of_rows(data, part("compute_ms")));
  EXPECT_EQ(marks(page, "time", "exposed communication"), of_rows(data, part("exposed_comm_ms")));
  EXPECT_EQ(marks(page, "time", "optimizer"), of_rows(data, part("optimizer_ms")));
  EXPECT_EQ(marks(page, "time", "data"), of_rows(data, part("data_ms")));
  EXPECT_EQ(marks(page, "time", "the rest"), of_rows(data, part("other_ms")));
  EXPECT_EQ(marks(page, "communication", "measured"), of_rows(data, metric("sent_bytes")));
  EXPECT_EQ(marks(page, "communication", "planned"), std::vector<double>(4, 4000000));
  EXPECT_EQ(marks(page, "memory", "optimizer").size(), 5u) << "one lies on the host";
  // Of the last one, which is picked at first.
  EXPECT_EQ(marks(page, "step-memory", "activations"), std::vector<double>{8000000});
  EXPECT_EQ(marks(page, "step-memory", "optimizer"), std::vector<double>{2500000});
  EXPECT_EQ(marks(page, "step-memory", "most at one time"), std::vector<double>{10500000});
  EXPECT_EQ(marks(page, "step-memory", "measured peak"), std::vector<double>{17000000});
  EXPECT_EQ(marks(page, "gantt", "slice"), (std::vector<double>{9, 8, 6, 9.25}));
}

// Figures in words, by hand from sample_comparison().
TEST_F(Browser, TablesTellTheFiguresOfTheJson) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "clipped"), "");
  EXPECT_EQ(attribute(page, "ragged"), "0") << "columns with cells to the left and to the right";
  expect_has(
      attribute(page, "memory-table"),
      {"ddp prefetch=2|optimizer|2 states x 4 B x &lt;i&gt;640,000&lt;/i&gt;|4.88 MiB|2.38 MiB"});
  expect_has(attribute(page, "communication-table"),
             {"ddp prefetch=2|3 x 1,000,000 B, all_gather &lt;b&gt;h.0&lt;/b&gt; to h.2 "
              "forward|3,000,000|3.81 MiB|4.20 MiB; |1,000,000 B, reduce_scatter root "
              "gradient|1,000,000||"});
  expect_has(attribute(page, "loss-table"),
             {"ddp prefetch=2|ddp prefetch=0|0|-|equal|must be equal",
              "|ddp prefetch=0|0.001|2|differ|must be equal"});
  EXPECT_EQ(attribute(page, "step-memory-table"),
            "optimizer|2 states x 4 B x &lt;i&gt;640,000&lt;/i&gt;|5,120,000|2,500,000; "
            "activations|1 x 700 B, gelu|700|9,000,000; |1 x 600 B, linear|600|; "
            "|1 x 500 B, layernorm|500|; |1 x 400 B, attention|400|; |1 x 300 B, add|300|; "
            "|2 smaller terms1 x 20 B, tokens: 20 B1 x 10 B, targets: 10 B|30|; "
            "optimizer, on the host|2 states x 4 B x 125,000|1,000,000|1,000,000");
  // The first compared with the last, and with the second, whose optimizer is on the host.
  const std::string outer = attribute(page, "outer"), inner = attribute(page, "inner");
  expect_has(
      outer,
      {"numbers|equal bits|differs by 0.001|", "last loss|3.250000|4.225000|× 1.30",
       "step|40.0 ms|30.8 ms|× 0.77", "· forward and backward|22.0 ms|16.9 ms|× 0.77",
       "· exposed communication|10.0 ms|7.69 ms|× 0.77", "· optimizer|4.00 ms|3.08 ms|× 0.77",
       "· data|1.00 ms|0.77 ms|× 0.77", "· the rest|3.00 ms|2.31 ms|× 0.77",
       "communication overlapped|80 %|80 %|× 1.00", "tokens/s|30,000|39,000|× 1.30",
       "peak memory|16.7 MiB|15.3 MiB|× 0.91", "· parameters|1.91 MiB|0.48 MiB|× 0.25",
       "· activations|8.58 MiB|8.58 MiB|× 1.00", "sent in a step|3.81 MiB|4.96 MiB|× 1.30",
       "collectives in a step|not measured|not measured|"});
  EXPECT_EQ(outer.find("on the host"), std::string::npos) << outer;
  expect_has(inner, {"on the host|not measured|0.95 MiB|; · optimizer|not measured|0.95 MiB|"});
}

// The fastest one's parity fails, and two others are nearly as fast.
TEST_F(Browser, CardsSayWhatTheirFiguresAreWorth) {
  ordered_json data = sample_comparison();
  data["configurations"][3]["name"] = data["fastest"]["name"] = "zero3";
  data["configurations"][1]["metrics"]["sent_bytes"]["median"] = 4e6;  // as the first
  const std::string page = drawn(data, sample_steps(), "1280,900");
  expect_has(page, {"No: 1 of 4 differ from what they must be."});  // and so 3 of 4 do not
  expect_has(attribute(page, "cards"),
             {"Equal bits|3 of 4|with ddp prefetch=0",
              "Fastest|39,000 tokens/s|zero3, whose parity fails, 30.8 ms a step; 2 others may be "
              "as fast",
              "Least memory on a rank|15.3 MiB|zero3, whose parity fails;",
              "Least sent in a step|3.81 MiB|ddp prefetch=0 and 1 other alike"});
  data["fastest"]["not_told_apart_from"].push_back("ddp prefetch=0");
  expect_has(attribute(drawn(data, sample_steps(), "1280,900"), "cards"),
             {"Fastest|None stands out|all 4 are as fast within noise"});
  data["fastest"] = {{"name", "ddp prefetch=2"}, {"not_told_apart_from", ordered_json::array()}};
  expect_has(attribute(drawn(data, sample_steps(), "1280,900"), "cards"),
             {"33,000 tokens/s|ddp prefetch=2, 36.4 ms a step;"});
  data["fastest"] = nullptr;
  expect_has(attribute(drawn(data, sample_steps(), "1280,900"), "cards"),
             {"Fastest|Too few rounds|to say: it takes --rounds=8"});
}

// On a logarithmic scale, with a lane for exactly 0.
TEST_F(Browser, LossesAreDrawnWhereTheyAre) {
  ordered_json data = sample_comparison();
  std::vector<double> loss = {5, 4.5, 4.75, 3, 3.25, 3.5, 3.75, 2.9, 2.8, 2.7, 2.6, 2.5};
  std::vector<double> difference = {0, 1e-4, 1e-3, 1e-1, 0, 2e-4, 0.03, 0, 1e-3, 0, 0, 5e-4};
  data["configurations"][0]["loss"] = loss;
  data["configurations"][3]["loss_difference"] = difference;
  const std::string page = drawn(data, sample_steps(), "1280,900");
  std::vector<double> steps;
  for (std::size_t i = 0; i < loss.size(); ++i) steps.push_back(static_cast<double>(i + 1));
  const Rows line = numbers(page, "loss-line");
  EXPECT_GT(expect_linear(column(line, 0), steps), 0);
  EXPECT_LT(expect_linear(column(line, 1), loss), 0);
  const Rows points = numbers(page, "differences");
  EXPECT_EQ(column(points, 0), difference);
  EXPECT_GT(expect_linear(column(points, 1), steps), 0);
  std::vector<double> at, logs;
  double lowest = 0, zero = 0;
  for (const auto& point : points) {
    if (point[0] == 0) {
      zero = point[2];
      continue;
    }
    at.push_back(point[2]);
    logs.push_back(std::log10(point[0]));
    lowest = std::max(lowest, point[2]);
  }
  int num_labels = 0;
  for (const auto& label : testing::parse_ordered_json(attribute(page, "scale"))) {
    if (!label[0].is_number()) continue;  // "exactly 0"
    at.push_back(label[1].get<double>() - 4);
    logs.push_back(std::log10(label[0].get<double>()));
    ++num_labels;
  }
  EXPECT_GE(num_labels, 3);
  EXPECT_LT(expect_linear(at, logs), 0);
  EXPECT_GT(zero, lowest + 10);
  // A line through its points, and those that differ nowhere in the lane.
  const Rows lines = numbers(page, "difference-lines");
  EXPECT_EQ(lines.size(), points.size());
  for (std::size_t i = 0; i < std::min(lines.size(), points.size()); ++i) {
    EXPECT_NEAR(lines[i][0], points[i][1], 0.1);
    EXPECT_NEAR(lines[i][1], points[i][2], 0.1);
  }
  const Rows zeros = numbers(page, "zeros");
  EXPECT_EQ(zeros.size(), steps.size());
  for (const auto& point : points) {
    if (point[0] == 0) {
      EXPECT_EQ(point[2], zero);
    }
  }
  for (const auto& point : zeros) EXPECT_EQ(point[2], zero);
}

// Two of the front are nearly at one place.
TEST_F(Browser, TheFrontIsDrawnAndNumbered) {
  ordered_json data = sample_comparison();
  const std::vector<double> total = {12e6, 9e6, 17e6, 9.02e6}, speed = {20000, 30000, 52000, 30100};
  for (std::size_t i = 0; i < 4; ++i) {
    ordered_json& row = data["configurations"][i];
    row["peak_bytes"]["total"] = total[i];
    row["metrics"]["tokens_per_s"]["median"] = speed[i];
    row["on_pareto_front"] = i > 0;
  }
  for (const char* size : {"1280,900", "500,800"}) {
    const std::string page = drawn(data, sample_steps(), size);
    std::vector<double> x, y, bytes, speeds;
    std::map<int, std::vector<double>> at;  // by row
    for (const auto& dot : numbers(page, "dots")) {
      const int row = static_cast<int>(dot[0]);
      at[row] = {dot[1], dot[2]};
      x.push_back(dot[1]);
      y.push_back(dot[2]);
      bytes.push_back(total.at(static_cast<std::size_t>(row)));
      speeds.push_back(speed.at(static_cast<std::size_t>(row)));
    }
    ASSERT_EQ(at.size(), 4u);
    for (const auto& label : testing::parse_ordered_json(attribute(page, "sizes"))) {
      if (!label[0].is_number()) continue;  // the name of the axis
      bytes.push_back(label[0].get<double>() * 1024 * 1024);
      x.push_back(label[1]);
    }
    for (const auto& label : numbers(page, "speeds")) {
      speeds.push_back(label[0]);
      y.push_back(label[1] - 4);
    }
    EXPECT_GT(bytes.size(), 5u);
    EXPECT_GT(speeds.size(), 5u);
    EXPECT_GT(expect_linear(x, bytes), 0);
    EXPECT_LT(expect_linear(y, speeds), 0);
    const std::vector<int> order = {1, 3, 2};  // by memory
    const Rows front = numbers(page, "front"), labels = numbers(page, "numbers");
    ASSERT_EQ(front.size(), order.size());
    ASSERT_EQ(labels.size(), order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::vector<double>& dot = at.at(order[i]);
      EXPECT_NEAR(front[i][0], dot[0], 0.1);
      EXPECT_NEAR(front[i][1], dot[1], 0.1);
      EXPECT_EQ(labels[i][0], static_cast<double>(i + 1));
      EXPECT_LT(std::hypot(labels[i][1] - dot[0], labels[i][2] - 4 - dot[1]), 40);
      for (std::size_t j = 0; j < i; ++j) {
        EXPECT_GT(std::hypot(labels[i][1] - labels[j][1], labels[i][2] - labels[j][2]), 10);
      }
    }
    expect_has(page, {": 1 ddp prefetch=2; 2 zero3 &lt;/script&gt;"});
    EXPECT_EQ(attribute(page, "clipped"), "");
  }
}

// As the program leaves it, of trainings.
TEST_F(Browser, DrawsARealComparison) {
  const Outcome compared = run_program("tools/compare/compare", testing::tiny_comparison(folder_));
  ASSERT_EQ(compared.exit_code, 0) << compared.err;
  const ordered_json data = testing::parse_ordered_json(folder_.read("out/compare.json"));
  const std::string page = drawn_page(folder_.read("out/report.html"), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "drawn"), "yes");
  EXPECT_EQ(attribute(page, "hidden"), "");
  const auto planned = [](const ordered_json& row) -> const ordered_json& {
    return row.at("planned").at("sent_bytes");
  };
  EXPECT_EQ(marks(page, "memory", "parameters"), of_rows(data, peak("parameter_shard")));
  EXPECT_EQ(marks(page, "memory", "optimizer"), of_rows(data, peak("optimizer")));
  EXPECT_EQ(marks(page, "memory", "peak"), of_rows(data, peak("total")));
  EXPECT_EQ(marks(page, "time", "forward and backward"), of_rows(data, part("compute_ms")));
  EXPECT_EQ(marks(page, "communication", "measured"), of_rows(data, metric("sent_bytes")));
  EXPECT_EQ(of_rows(data, planned).size(), 3u) << "ddp has no gathers for prefetch to hide";
  EXPECT_EQ(marks(page, "communication", "planned"), of_rows(data, planned));
  expect_has(page, {"same plan as ddp prefetch=0", "<dt>load at the start</dt>"});
  // The first compared with the last, and with the second: what differs, and nothing that does not.
  const std::string outer = attribute(page, "outer"), inner = attribute(page, "inner");
  for (const char* row : {"parallel.strategy|ddp|zero3|", "parallel.prefetch|0|1|"}) {
    EXPECT_NE(outer.find(row), std::string::npos) << outer;
  }
  EXPECT_NE(inner.find("parallel.strategy|ddp|zero3|"), std::string::npos) << inner;
  EXPECT_EQ(inner.find("parallel.prefetch"), std::string::npos) << inner;
  EXPECT_EQ(inner.find("model."), std::string::npos) << inner;
}

TEST_F(Browser, IsUsedByKeyboard) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "focused"), "true");
  EXPECT_EQ(attribute(page, "readout").find("ddp prefetch=2: parameters"), 0u)
      << attribute(page, "readout");
  EXPECT_EQ(attribute(page, "moment"),
            "at 4.00 ms: 10.0 MiB · optimizer 2.38 MiB · activations 7.63 MiB");
  EXPECT_EQ(attribute(page, "slice"),
            "linear: 9.25 ms on compute, from 6.00 ms on, ddp prefetch=0");
  EXPECT_EQ(attribute(page, "levels"), "true");
  EXPECT_EQ(attribute(page, "unscoped"), "0");
  EXPECT_EQ(attribute(page, "unnamed"), "0");
  EXPECT_EQ(attribute(page, "faint"), "");
  // The fastest step is that of the last one.
  EXPECT_EQ(attribute(page, "first").find("zero3 "), 0u) << attribute(page, "first");
}

TEST_F(Browser, StreamsAreThoseThatArePicked) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "choices"),
            "ddp prefetch=0|ddp prefetch=2; ddp prefetch=0|ddp prefetch=2|none");
  EXPECT_EQ(attribute(page, "picked"), "ddp prefetch=0: 25.0 ms; 9.25");
  expect_has(attribute(page, "note"), {"Planned: ", "One was traced and one is planned",
                                       "3 of the shortest slices of ddp prefetch=0"});
}

TEST_F(Browser, NothingIsCutOnPaperAndColoursStay) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) {
    row["metrics"]["tokens_per_s"]["median"] = 1234567;
    row["metrics"]["step_ms"] = {{"median", 1234}, {"q1", 1133.1}, {"q3", 1345.6}};
    row["speed"]["slower_percent"] = {{"median", 123.4}, {"low", 101.1}, {"high", 145.6}};
  }
  data["configurations"][1]["name"] = "zero3 precision.param=bf16 prefetch=1 offload.optimizer=0.5";
  const std::string page = drawn_in_frame(data, sample_steps(), 703, kPaper);
  EXPECT_EQ(attribute(page, "width"), "703");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "cut"), "");
  EXPECT_EQ(attribute(page, "heads"),
            "configuration; numbers; last loss; step, ms; slower, %; exposed, ms; tokens/s; "
            "peak, MiB; sent, MiB; overlap, %");
  EXPECT_GE(std::stod(attribute(page, "smallest")), 8.5) << "pixels: 6.4 points";
  EXPECT_GT(std::stoi(attribute(page, "swatches")), 15);
  EXPECT_EQ(attribute(page, "bare"), "0") << "drawn without its colour";
  EXPECT_EQ(attribute(page, "hints"), "0") << "asks for a pointer";
  EXPECT_EQ(attribute(page, "plots"), "332 332 640 640 640") << "drawn for the screen";
}

TEST_F(Browser, FitsNarrowScreensAndFollowsTheColourScheme) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "500,800", true);
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "overflows"), "false");
  EXPECT_EQ(attribute(page, "clipped"), "");
  EXPECT_EQ(attribute(page, "dark"), "true");
  ordered_json steps = sample_steps();
  steps["steps"][1]["name"] = "zero3 prefetch=1 offload.optimizer=0.5 with prefetch=0";
  const std::string telephone = drawn_in_frame(sample_comparison(), steps, 360);
  EXPECT_EQ(attribute(telephone, "width"), "360");
  EXPECT_EQ(attribute(telephone, "scrolls"), "0") << "a side or a column is out of sight";
  EXPECT_EQ(attribute(page, "faint"), "");
  EXPECT_EQ(attribute(telephone, "errors"), "0");
  EXPECT_EQ(attribute(telephone, "drawn"), "yes");
  EXPECT_EQ(attribute(telephone, "overflows"), "false");
  EXPECT_EQ(attribute(telephone, "clipped"), "");
  EXPECT_EQ(attribute(telephone, "ragged"), "0");
}

TEST_F(Browser, WithLittleToShowItLeavesTheRestOut) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) {
    for (auto& metric : row["metrics"]) metric = nullptr;
    row["step_parts_ms"] = nullptr;
    row["planned"]["sent_bytes"] = nullptr;
  }
  data["fastest"] = data["rounds_needed"] = nullptr;
  const std::string page = drawn(data, testing::no_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "hidden"), "step-memory time communication pareto gantt");
}

}  // namespace
}  // namespace tessera::tools

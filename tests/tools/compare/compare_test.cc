// The program as a person runs it: tiny trainings, a planted fault, an interruption, requests that
// cannot be.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/tiny_comparison.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

class Compare : public ::testing::Test {
 protected:
  Compare() : flags_(testing::tiny_comparison(folder_)) {}

  Outcome compare(const Flags& more = {}) const {
    Flags flags = more;
    flags.insert(flags_.begin(), flags_.end());
    return run_program("tools/compare/compare", flags);
  }
  json results() const { return testing::parse_json(folder_.read("out/compare.json")); }
  /// What the page's charts are drawn from.
  json page_data() const {
    const std::string page = folder_.read("out/report.html"), begin = "id=\"data\">";
    const std::size_t at = page.find(begin) + begin.size();
    return testing::parse_json(page.substr(at, page.find("</script>", at) - at));
  }
  std::string state(int i) const { return results().at("configurations").at(i).at("state"); }

  /// A trainer that does `script` with $train, the real one, and $out, the folder of its run.
  std::string trainer(const std::string& script) const {
    const std::string path = folder_.write(
        "trainer",
        "#!/bin/bash\ntrain=" + fs::absolute("tools/programs/train_transformer").string() +
            "\nout=${2#--out=}\n" + script);
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }

  const TempFolder folder_;
  Flags flags_;
};

/// What the logs of all rounds of one configuration say.
struct Logs {
  std::map<std::string, std::vector<double>> values;  ///< of each step after the warm-up
  std::vector<double> peaks;                          ///< of each round
  json planned;                                       ///< of the first

  double median(const std::string& field) const {
    std::vector<double> sorted = values.at(field);
    std::ranges::sort(sorted);
    const std::size_t half = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }
};

Logs read_logs(const TempFolder& folder, const std::string& configuration, int num_rounds,
               int num_warmup) {
  Logs logs;
  for (int round = 1; round <= num_rounds; ++round) {
    std::istringstream lines(
        folder.read(fmt::format("out/{}/round-{}/log.jsonl", configuration, round)));
    json record;
    for (std::string line; std::getline(lines, line);) {
      const json next = testing::parse_json(line);
      if (next.contains("final")) {
        logs.peaks.push_back(record.at("peak_bytes").at("total").get<double>());
        if (round == 1) logs.planned = next.at("final").at("planned");
        continue;
      }
      record = next;
      if (record.at("step").get<int>() <= num_warmup) continue;
      for (const char* field : {"step_ms", "exposed_comm_ms", "tokens_per_s", "sent_bytes"}) {
        logs.values[field].push_back(record.at(field).get<double>());
      }
    }
  }
  return logs;
}

/// Expects that a cell or a part of one tells `value` in `unit`, as exactly as its digits do.
void expect_told(const std::string& cells, const std::string& field, double value, double unit) {
  const std::string begin = fmt::format("data-field=\"{}\" data-value=\"", field);
  const std::size_t at = cells.find(begin);
  ASSERT_NE(at, std::string::npos) << field;
  EXPECT_EQ(std::stod(cells.substr(at + begin.size())), value) << field;
  const std::size_t text = cells.find('>', at) + 1;
  std::string shown = cells.substr(text, cells.find('<', text) - text);
  std::erase(shown, ',');
  shown.erase(0, shown.find_first_of("0123456789"));
  const std::size_t point = shown.find('.');
  const double digits = point == std::string::npos ? 0 : double(shown.size() - point - 1);
  EXPECT_NEAR(std::stod(shown), value / unit, 0.501 * std::pow(10, -digits)) << field;
}

// In the JSON, the page and the table.
TEST_F(Compare, FiguresAreThoseOfTheLogs) {
  flags_["train.steps"] = "5";
  const Outcome outcome = compare({{"rounds", "3"}, {"warmup_steps", "2"}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string page = folder_.read("out/report.html");
  const json all = results();
  ASSERT_EQ(all.at("configurations").size(), 4u);
  EXPECT_TRUE(has(page, {">step, ms<", ">peak, KiB<", ">sent, KiB<"}));
  constexpr double kMiB = 1 << 20;
  for (const json& row : all.at("configurations")) {
    if (row.at("state") == "same plan") continue;
    const Logs logs = read_logs(folder_, row.at("folder").get<std::string>(), 3, 2);
    ASSERT_EQ(logs.values.at("step_ms").size(), 9u);
    ASSERT_EQ(logs.peaks.size(), 3u);
    const std::string name = row.at("name");
    const double peak = std::ranges::max(logs.peaks);
    const double planned_peak = logs.planned.at("peak_bytes").at("total").get<double>();
    const double planned_sent = logs.planned.at("sent_bytes").get<double>();
    // The row of the page and that of the table.
    const std::size_t at = page.find(fmt::format("<th scope=\"row\">{}</th>", name));
    ASSERT_NE(at, std::string::npos);
    const std::string cells = page.substr(at, page.find("</tr>", at) - at);
    const std::size_t line = outcome.out.rfind("\n" + name + "  ");
    ASSERT_NE(line, std::string::npos);
    std::istringstream words(outcome.out.substr(line, outcome.out.find('\n', line + 1) - line));
    const std::vector<std::string> shown{std::istream_iterator<std::string>(words), {}};
    const auto is_shown = [&](const char* field, double value, const char* format, double unit) {
      const std::string text = fmt::format(fmt::runtime(format), value / unit);
      EXPECT_TRUE(std::ranges::count(shown, text) > 0) << name << " " << field << " " << text;
      expect_told(cells, field, value, unit == kMiB ? 1024 : 1);  // KiB, as all are less than MiB
    };
    for (const auto& [field, format, unit] : {std::tuple("step_ms", "{:.2f}", 1.0),
                                              {"exposed_comm_ms", "{:.2f}", 1.0},
                                              {"tokens_per_s", "{:.0f}", 1.0},
                                              {"sent_bytes", "{:.2f}", kMiB}}) {
      const double median = logs.median(field);
      EXPECT_EQ(row.at("metrics").at(field).at("median").get<double>(), median) << name << field;
      is_shown(field, median, format, unit);
    }
    EXPECT_EQ(row.at("peak_bytes").at("total").get<double>(), peak);
    is_shown("peak_bytes", peak, "{:.2f}", kMiB);
    EXPECT_EQ(row.at("planned").at("peak_bytes").at("total").get<double>(), planned_peak);
    EXPECT_EQ(row.at("planned").at("sent_bytes").get<double>(), planned_sent);
    for (const auto& [field, value] :
         {std::pair("planned_peak_bytes", planned_peak), {"planned_sent_bytes", planned_sent}}) {
      expect_told(cells, field, value, 1024);
      EXPECT_TRUE(std::ranges::count(shown, fmt::format("{:.2f}", value / kMiB)) > 0)
          << name << " " << field;
    }
  }
}

TEST_F(Compare, EndToEnd) {
  const Outcome outcome = compare({{"rounds", "2"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"[6/6] zero3 prefetch=", ", round 2: loss", "baseline",
                                "all 3 that were trained give the same bits"}));
  const json all = results();
  EXPECT_TRUE(all.at("verdict").at("passed").get<bool>());
  ASSERT_EQ(all.at("configurations").size(), 4u);
  const std::string page = folder_.read("out/report.html");
  std::string sha;
  for (const json& row : all.at("configurations")) {
    if (row.at("state") == "same plan") continue;
    // The figures are those of the log.
    const std::string log =
        folder_.read("out/" + row.at("folder").get<std::string>() + "/round-2/log.jsonl");
    const std::string hash = row.at("params_sha256").at(1);
    EXPECT_TRUE(has(log, {"\"params_sha256\":\"" + hash}));
    EXPECT_TRUE(has(log, {"\"loss\":" + testing::json_text(row.at("last_loss")) + ","}));
    EXPECT_TRUE(has(log, {"\"total\":" + testing::json_text(row.at("peak_bytes").at("total"))}));
    EXPECT_TRUE(
        has(page, {"data-field=\"step_ms\" data-value=\"" +
                   testing::json_text(row.at("metrics").at("step_ms").at("median")) + "\""}));
    EXPECT_TRUE(sha.empty() || sha == hash);
    sha = hash;
  }
  EXPECT_NE(all.at("configurations")[0].at("peak_bytes"),
            all.at("configurations")[3].at("peak_bytes"));
  EXPECT_TRUE(
      has(folder_.read("out/runs/zero3_prefetch=1/configuration.toml"), {"strategy = \"zero3\""}));
}

// All steps but the last are warm-up, and slow.
TEST_F(Compare, ALineOfProgressLeavesOutTheWarmUpAsTheTableDoes) {
  const std::string slow = trainer(
      "\"$train\" \"$@\" && sed -i '1,3s/\"step_ms\":/\"step_ms\":900000,\"was\":/' "
      "\"$out/log.jsonl\"\n");
  const Outcome outcome =
      compare({{"trainer", slow}, {"warmup_steps", "3"}, {"sweep", "parallel.prefetch=1"}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json rows = results().at("configurations");
  ASSERT_EQ(rows.size(), 2u);
  for (const json& row : rows) {
    const double median = row.at("metrics").at("step_ms").at("median");
    EXPECT_TRUE(has(outcome.out, {fmt::format("loss {:.4f}, {:.1f} ms a step",
                                              row.at("last_loss").get<double>(), median)}))
        << outcome.out;
  }
}

TEST_F(Compare, AnotherArithmeticIsMeasuredAgainstTheTolerance) {
  flags_["strategies"] = "ddp";
  flags_["sweep"] = "precision.param=f32,bf16";
  const Outcome within = compare({{"tolerance", "1"}});
  EXPECT_EQ(within.exit_code, 0) << within.err;
  EXPECT_TRUE(
      has(within.out, {"ddp precision.param=bf16 differs from ddp precision.param=f32 by up to ",
                       " (1 allowed), first in step "}));
  const Outcome beyond = compare({{"tolerance", "1e-9"}, {"out", folder_ / "b"}});
  EXPECT_EQ(beyond.exit_code, 1);
  EXPECT_TRUE(has(beyond.out, {"Parity fails: ddp precision.param=bf16 differs from ddp "
                               "precision.param=f32 by up to ",
                               " (1e-09 allowed), first in step "}));
}

TEST_F(Compare, APlantedWrongBitFailsAndIsNamed) {
  const std::string bad_loss = trainer(
      "\"$train\" \"$@\" || exit 1\n"
      "[[ $out == */zero3_prefetch=1/* ]] && sed -i '3s/\"loss\":./\"loss\":9/' "
      "\"$out/log.jsonl\"\n"
      "exit 0\n");
  const Outcome outcome = compare({{"trainer", bad_loss}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(
      has(outcome.out, {"Parity fails: zero3 prefetch=1 differs from ddp prefetch=0 by up to ",
                        ", first in step 3.\n"}));
  EXPECT_TRUE(has(outcome.err, {"[parity]"}));
  EXPECT_EQ(results().at("configurations")[3].at("parity").at("first_step"), 3);
  EXPECT_NE(folder_.read("out/report.html").find(">Parity fails<"), std::string::npos);

  const std::string bad_hash = trainer(
      "\"$train\" \"$@\" || exit 1\n"
      "[[ $out == */zero3_prefetch=0/* ]] && sed -i "
      "'s/\"params_sha256\":\"./\"params_sha256\":\"x/' \"$out/log.jsonl\"\n"
      "exit 0\n");
  const Outcome hash = compare({{"trainer", bad_hash}, {"out", folder_ / "b"}});
  EXPECT_EQ(hash.exit_code, 1);
  EXPECT_TRUE(has(hash.out, {"Parity fails: zero3 prefetch=0 ends with other parameters than ddp "
                             "prefetch=0, after equal losses.\n"}));
}

// One bit of what rank 1 sends under zero3: no log was touched.
TEST_F(Compare, AStrategyThatIsBrokenIsNamedAndSoIsItsUnit) {
  flags_.erase("sweep");
  flags_["strategies"] = "ddp,zero2,zero3,hsdp:1";
  flags_["trainer"] = fs::absolute("tests/tools/programs/broken_trainer");
  const Outcome outcome = compare();
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.out, {"Parity fails: zero3 "})) << outcome.out;
  EXPECT_TRUE(has(outcome.err, {"[parity]"}));
  const json rows = results().at("configurations");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json& parity = rows[i].at("parity");
    EXPECT_EQ(parity.at("kind") == "differs", i == 2) << rows[i].at("name") << parity;
  }
  EXPECT_EQ(rows[3].at("name"), "hsdp:1");
  EXPECT_EQ(rows[3].at("folder"), "runs/hsdp_1");
  EXPECT_EQ(rows[3].at("options").at("parallel.shard_ranks"), 1);
  EXPECT_NE(folder_.read("out/report.html").find("<th scope=\"row\">hsdp:1</th>"),
            std::string::npos);

  flags_.erase("strategies");
  std::vector<std::string> words = {"--find-divergence", "zero2", "zero3"};
  for (const auto& [name, value] : flags_) {
    if (name != "warmup_steps") words.push_back("--" + name + "=" + value);
  }
  const Outcome found = run_program("tools/compare/compare", words);
  EXPECT_EQ(found.exit_code, 1);
  EXPECT_TRUE(has(found.out, {"First difference: step 1", "unit h.1, tensor h.1.ln_1.weight",
                              " 1 of 8 elements differ"}))
      << found.out << found.err;
  const json first =
      testing::parse_json(folder_.read("out/divergence/divergence.json")).at("first");
  EXPECT_EQ(first.at("b").at("unit"), "h.1");
  EXPECT_EQ(first.at("step"), 1);
}

TEST_F(Compare, ATrainingThatFailsIsNamedAndTheOthersGoOn) {
  const std::string failing = trainer(
      "[[ $out == */zero3_prefetch=0/* ]] && { echo no memory >&2; kill -KILL $$; }\nexec "
      "\"$train\" "
      "\"$@\"\n");
  const Outcome outcome = compare({{"trainer", failing}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.out,
                  {"[2/3] zero3 prefetch=0: failed, SIGKILL; see", "Failed: zero3 prefetch=0."}));
  EXPECT_TRUE(has(folder_.read("out/runs/zero3_prefetch=0/round-1/console.txt"), {"no memory"}));
  EXPECT_EQ(state(2), "failed");
  EXPECT_EQ(state(3), "done");
}

TEST_F(Compare, WaitsForTheTrainingThatAKilledComparisonHasLeft) {
  flags_.erase("sweep");
  flags_["strategies"] = "ddp";
  const std::string folder = folder_ / "out/runs/ddp/round-1", err = folder_ / "err";
  fs::create_directories(folder);
  std::string command = "tools/compare/compare --resume=true";
  for (const auto& [name, value] : flags_) command += " '--" + name + "=" + value + "'";
  const Outcome outcome = run_program(
      "/bin/bash",
      std::vector<std::string>{
          "-c", "exec 9> " + folder + "/.lock; flock 9; " + command + " 2> " + err +
                    " 9>&- & P=$!; until grep -q 'waiting for an earlier training' " + err +
                    "; do kill -0 $P || exit 99; sleep 0.02; done; exec 9>&-; wait $P"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << folder_.read("err");
  EXPECT_EQ(state(0), "done");
}

TEST_F(Compare, AnInterruptionKeepsWhatThereIsAndResumeTrainsTheRest) {
  // Asks the comparison to stop while the second one that is trained trains, the first time.
  const std::string marker = folder_ / "was_here";
  const std::string script =
      trainer("[[ $out == */zero3_prefetch=0/* && ! -e " + marker + " ]] && { touch " + marker +
              "; kill -INT $PPID; }\nexec \"$train\" \"$@\"\n");
  flags_["trainer"] = script;
  const Outcome stopped = compare();
  EXPECT_EQ(stopped.exit_code, 1);
  EXPECT_TRUE(has(
      stopped.out,
      {"zero3 prefetch=0: interrupted",
       "Not complete: 2 of 4 missing (zero3 prefetch=0; zero3 prefetch=1); --resume goes on."}));
  EXPECT_EQ(state(0), "done");
  EXPECT_EQ(state(2), "missing");
  EXPECT_NE(folder_.read("out/report.html").find(">Not complete<"), std::string::npos);
  const std::string kept = folder_.read("out/runs/ddp_prefetch=0/round-1/log.jsonl");

  EXPECT_TRUE(has(compare().err, {"expected a folder without a comparison, or --resume"}));
  EXPECT_TRUE(has(compare({{"resume", "true"}, {"train.steps", "5"}}).err,
                  {"[resume] expected the options of the comparison that is there, got steps = 5 "
                   "where it has steps = 4; ask for the same, or choose another --out (",
                   "configuration ddp prefetch=0"}));
  EXPECT_TRUE(
      has(compare({{"resume", "true"}, {"sweep", "parallel.prefetch=1"}}).err,
          {"[resume] expected a command that asks for all that the folder has of an earlier "
           "comparison, got one without ddp_prefetch=0; zero3_prefetch=0: ask for them too, "
           "or choose another --out (" +
           folder_.path()}));
  EXPECT_TRUE(
      has(compare({{"resume", "true"}, {"trainer", "tools/programs/train_transformer"}}).err,
          {"another build of it"}));
  EXPECT_TRUE(has(compare({{"resume", "true"}, {"out", folder_ / "new"}}).err,
                  {"to go on with, got none"}));

  const Outcome resumed = compare({{"resume", "true"}});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err << resumed.out;
  EXPECT_TRUE(has(resumed.out, {"[1/3] ddp prefetch=0: kept", "[2/3] zero3 prefetch=0: loss",
                                "all 3 that were trained give the same bits"}));
  EXPECT_EQ(folder_.read("out/runs/ddp_prefetch=0/round-1/log.jsonl"), kept);
  EXPECT_EQ(state(2), "done");
  EXPECT_EQ(results().at("made_by").at("kept_trainings"), 1);
  EXPECT_TRUE(has(results().at("made_by").at("command").get<std::string>(), {"--resume=true"}));
}

TEST_F(Compare, TracesOfTheRunsAreDrawn) {
  flags_["strategies"] = "zero3";
  const std::string traced = trainer(
      "\"$train\" \"$@\" && echo "
      "'[{\"ph\":\"X\",\"pid\":0,\"tid\":1,\"ts\":0,\"dur\":5,\"name\":\"planted\"}]' "
      "> \"$out/trace.json\"\n");
  ASSERT_EQ(compare({{"trainer", traced}}).exit_code, 0);
  const json page = page_data();
  const auto drawn_first = [&](std::size_t i) {
    return page.at("drawn").at(page.at("streams").at(i).get<std::size_t>());
  };
  EXPECT_EQ(drawn_first(0).at("name"), "zero3 prefetch=1") << "on above off";
  EXPECT_EQ(drawn_first(1).at("name"), "zero3 prefetch=0");
  EXPECT_EQ(drawn_first(0).at("source"), "trace");
  EXPECT_EQ(page.at("slice_names"), json::array({"planted"}));
  folder_.write("out/runs/zero3_prefetch=1/round-1/trace.json", "{");
  const Outcome again = compare({{"trainer", traced}, {"resume", "true"}});
  EXPECT_EQ(again.exit_code, 0);
  EXPECT_TRUE(has(again.err, {"zero3_prefetch=1/round-1/trace.json", "the page does not show it"}));
}

TEST_F(Compare, TheTraceOfALaterRoundIsDrawnIfTheFirstFailed) {
  const std::string failing = trainer(
      "[[ $out == */round-1 ]] && exit 3\n\"$train\" \"$@\"\n"
      "echo '[{\"ph\":\"X\",\"pid\":0,\"tid\":1,\"ts\":0,\"dur\":5,\"name\":\"planted\"}]' "
      "> \"$out/trace.json\"\n");
  EXPECT_EQ(compare({{"trainer", failing},
                     {"rounds", "2"},
                     {"strategies", "zero3"},
                     {"sweep", "parallel.prefetch=1"}})
                .exit_code,
            1);
  EXPECT_TRUE(has(folder_.read("out/report.html"), {"\"planted\"", "\"source\":\"trace\""}));
}

// What is drawn of a step is what was measured, and gathers ahead are above the same without.
TEST_F(Compare, StepsAreDrawnAsPlannedWithoutATrace) {
  ASSERT_EQ(compare().exit_code, 0);
  const json drawn = page_data();
  const json &off = drawn.at("drawn")[1], &on = drawn.at("drawn")[2];
  EXPECT_EQ(drawn.at("streams"), json::array({2, 1}));
  EXPECT_EQ(on.at("name"), "zero3 prefetch=1");
  EXPECT_EQ(on.at("source"), "plan");
  EXPECT_LT(on.at("duration_ms"), off.at("duration_ms")) << "gathers are hidden";
  json rows = results().at("configurations");
  ASSERT_EQ(rows[1].at("state"), "same plan");
  rows.erase(1);
  ASSERT_EQ(drawn.at("drawn").size(), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json& step = drawn.at("drawn")[i];
    EXPECT_EQ(step.at("name"), rows[i].at("name"));
    const auto most = [](const json& values) {
      return std::ranges::max(values.get<std::vector<std::int64_t>>());
    };
    const json& peaks = rows[i].at("peak_bytes");
    EXPECT_EQ(most(step.at("memory").at("total")), peaks.at("total")) << i;
    for (const char* category : {"activation", "gradient", "optimizer", "parameter_shard"}) {
      EXPECT_EQ(most(step.at("memory").at("bytes").at(category)), peaks.at(category))
          << i << category;
    }
    // Which the page says of them.
    for (const char* category :
         {"gradient", "optimizer", "parameter_shard", "gathered_parameter"}) {
      const json held = step.at("memory").at("bytes").value(category, json::array({0}));
      EXPECT_TRUE(std::ranges::all_of(held, [&](const json& b) { return b == held.front(); }))
          << category << " is held throughout: " << held;
    }
    EXPECT_TRUE(has(testing::json_text(step.at("terms")), {"2 states x 4 B x "}));
  }
}

TEST_F(Compare, OverlapIsMeasuredWithATrace) {
  const Outcome outcome = compare({{"strategies", "zero3"},
                                   {"sweep", "parallel.prefetch=1"},
                                   {"log.trace", "asked"},
                                   {"log.trace_steps", "1:3"}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"overlap %"}));
  const json row = results().at("configurations").at(0);
  // Repeating a configuration leaves no trace where nobody asked for one.
  const std::string toml = "out/runs/zero3_prefetch=1/configuration.toml";
  const Outcome repeated = run_program("tools/programs/train_transformer",
                                       {{"config", folder_ / toml}, {"out", folder_ / "again"}});
  EXPECT_EQ(repeated.exit_code, 0) << repeated.err;
  EXPECT_FALSE(fs::exists("asked"));
  EXPECT_TRUE(has(folder_.read(toml), {"# Traced: --log.trace=FILE --log.trace_steps=1:3"}));
  EXPECT_TRUE(has(
      compare({{"strategies", "zero3"}, {"sweep", "parallel.prefetch=1"}, {"resume", "true"}}).err,
      {"[resume] expected the options of the comparison that is there"}));
  std::istringstream log(
      folder_.read("out/" + row.at("folder").get<std::string>() + "/round-1/log.jsonl"));
  json end;
  for (std::string line; std::getline(log, line);) end = testing::parse_json(line);
  std::vector<double> overlaps;  // after the warm-up
  const json trace = end.at("final").at("trace");
  for (const json& step : trace.at("steps")) {
    if (step.at("step") == 1) continue;
    overlaps.push_back(step.at("hidden_ms").get<double>() / step.at("comm_ms").get<double>());
  }
  ASSERT_EQ(overlaps.size(), 2u);
  const double expected = (overlaps[0] + overlaps[1]) / 2;
  const double overlap = row.at("metrics").at("overlap").at("median");
  EXPECT_DOUBLE_EQ(overlap, expected);
  EXPECT_TRUE(has(folder_.read("out/report.html"), {"data-field=\"overlap\" data-value=\"" +
                                                    testing::json_text(json(overlap)) + "\""}));
}

TEST_F(Compare, WhatCannotBeIsAnErrorBeforeAnythingIsTrained) {
  const auto refused = [&](const Flags& more, const std::string& words) {
    const Outcome outcome = compare(more);
    EXPECT_EQ(outcome.exit_code, 1) << words;
    EXPECT_TRUE(has(outcome.err, {words}));
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(fs::exists(folder_ / "out/runs"));
  };
  refused({{"sweep", "parallel.prefech=0,1"}}, "did you mean parallel.prefetch?");
  refused({{"sweep", "parallel.prefetch=0,-1"}}, "configuration ddp prefetch=-1");
  refused({{"strategies", "zero3,hsdp"}, {"sweep", "parallel.shard_ranks=3"}}, "shard_ranks");
  // What only some of the ranks can be, and what no plan fits.
  refused({{"strategies", "hsdp:1,hsdp:2"},
           {"comm.hook", "powersgd"},
           {"powersgd.across_replicas", "true"}},
          "with more than one replica, got one, as all 2 ranks share a copy");
  refused({{"strategies", "hsdp:1,hsdp:2"},
           {"comm.hook", "powersgd"},
           {"powersgd.across_replicas", "true"}},
          "(configuration hsdp:2 prefetch=0)");
  refused({{"memory_budget", "20kB"}}, "(configuration ddp prefetch=0)");
  refused({{"memory_budget", "20kB"}}, "a way to train within 20,000 bytes per rank, got none");
  refused({{"report", folder_ / "nowhere/report.html"}}, "nowhere/report.html");
  refused({{"report", folder_ / "out/compare.json"}}, "[report]");
  refused({{"report", folder_ / "./out/compare.json"}}, "[report]");
  refused({{"trainer", folder_ / "nothing"}}, "[trainer] expected a program");
  refused({{"data.path", "/nowhere"}}, "/nowhere");
  folder_.write("file", "");
  refused({{"out", folder_ / "file"}}, "[out] expected a folder");
}

TEST_F(Compare, OneOfSeveralProcessesIsRefusedUnlessTrainingsTakeNoNotice) {
  const std::map<std::string, std::string> second = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  flags_["strategies"] = "ddp";
  flags_.erase("sweep");
  const Outcome refused = run_program("tools/compare/compare", flags_, second);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(
      has(refused.err, {"[compare] expected to be started once, got env, process 1 of 2 ("}));
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  flags_["parallel.launcher"] = "threads";
  EXPECT_EQ(run_program("tools/compare/compare", flags_, second).exit_code, 0);
  EXPECT_EQ(state(0), "done");
}

TEST_F(Compare, AnInputIsNoOutput) {
  const std::string data = flags_.at("data.path"), text = folder_.read("text.txt");
  const std::string program = trainer("exec $train \"$@\"\n"), script = folder_.read("trainer");
  const std::string toml = folder_.write("a.toml", "train.lr = 0.01\n");
  const std::string model = folder_ / "m";
  ASSERT_EQ(run_program("tools/programs/train_transformer", Flags{{"data.path", data},
                                                                  {"model.layers", "2"},
                                                                  {"model.heads", "2"},
                                                                  {"model.dim", "8"},
                                                                  {"model.seq", "8"},
                                                                  {"train.steps", "1"},
                                                                  {"sample.tokens", "0"},
                                                                  {"device", "cpu"},
                                                                  {"log.peak_ms", "0"},
                                                                  {"save.final", model},
                                                                  {"out", folder_ / "made"}})
                .exit_code,
            0);
  const std::string sizes = folder_.read("m/config.json");
  fs::create_symlink(data, folder_ / "symbolic");
  fs::create_hard_link(data, folder_ / "hard");
  const auto refused = [&](const Flags& more, const std::vector<std::string>& words) {
    const Outcome outcome = compare(more);
    EXPECT_EQ(outcome.exit_code, 1) << words[0];
    for (const std::string& part : words) EXPECT_TRUE(has(outcome.err, {part})) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(folder_.read("text.txt"), text);
    EXPECT_EQ(folder_.read("trainer"), script);
    EXPECT_EQ(folder_.read("a.toml"), "train.lr = 0.01\n");
    EXPECT_EQ(folder_.read("m/config.json"), sizes);
  };
  for (const std::string name : {"text.txt", "./text.txt", "symbolic", "hard"}) {
    refused({{"report", folder_ / name}}, {"[config] expected report and data.path", name});
  }
  refused({{"report", program}, {"trainer", program}}, {"[config] expected report and trainer"});
  refused({{"report", toml}, {"config", toml}}, {"[config] expected report and config"});
  refused({{"report", model + "/config.json"}, {"init.from", model}},
          {"[config] expected report and init.from"});
  refused({{"report", folder_ / "out/.lock"}}, {"[config] expected report and the lock of out"});
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  fs::create_directory(folder_ / "out");
  // One that has the name of an output, or of a training's.
  for (const std::string name : {"compare.json", "report.html", "gemm_algorithms.txt"}) {
    const std::string path = folder_.write("out/" + name, text);
    refused({{"data.path", path}}, {"[config] expected out and data.path", name});
    EXPECT_EQ(folder_.read("out/" + name), text);
    fs::remove(path);
  }
  const std::string given = folder_.write("out/compare.json", "train.lr = 0.01\n");
  refused({{"config", given}}, {"[config] expected out and config", given});
  EXPECT_EQ(folder_.read("out/compare.json"), "train.lr = 0.01\n");
  const std::string console = folder_ / "out/runs/ddp_prefetch=0/round-1/console.txt";
  fs::create_directories(fs::path(console).parent_path());
  fs::create_hard_link(data, console);
  for (const std::string& path : {console, data}) {
    refused({{"data.path", path}, {"resume", "true"}},
            {"[config] expected data.path to name no file of the trainings of out", path});
  }
  flags_.erase("data.path");
  refused({{"report", folder_ / "hard"}, {"sweep", "data.path=" + data}},
          {"[config] expected report and data.path"});
}

}  // namespace
}  // namespace tessera::tools

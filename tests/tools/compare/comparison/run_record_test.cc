// What a comparison reads of a log, and what it refuses.
#include "tools/compare/comparison/run_record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;
using testing::TempFolder;

const std::string kSteps =
    R"({"step":1,"loss":2.5,"step_ms":10,"overlap":0.5,"peak_bytes":{"optimizer":8,"total":9}})"
    "\n"
    R"({"step":2,"loss":null,"step_ms":12,"overlap":null,"sent_bytes":7,"peak_bytes":{"optimizer":8,"total":11}})"
    "\n";
const std::string kEnd = R"({"final":{"params_sha256":"ab","device":"cpu"}})"
                         "\n";

std::string error_of_log(const std::string& text) {
  const TempFolder folder;
  const std::string path = folder.write("log.jsonl", text);
  return error_of<engine::Error>([&] { read_run_record(path); });
}

TEST(RunRecord, IsWhatTheLogTellsAndNothingElse) {
  const TempFolder folder;
  const RunRecord run = read_run_record(folder.write("log.jsonl", kSteps + kEnd));
  ASSERT_EQ(run.loss.size(), 2u);
  EXPECT_EQ(run.loss[0], 2.5);
  EXPECT_TRUE(std::isnan(run.loss[1]));
  EXPECT_EQ(run.metrics.at("step_ms"), (std::vector<double>{10, 12}));
  // What one step does not tell is not known.
  EXPECT_FALSE(run.metrics.contains("overlap"));
  EXPECT_FALSE(run.metrics.contains("sent_bytes"));
  EXPECT_FALSE(run.metrics.contains("compute_ms"));
  EXPECT_EQ(run.peak_bytes, (BytesByCategory{{"optimizer", 8}, {"total", 11}}));
  EXPECT_TRUE(run.host_peak_bytes.empty() && run.planned_peak_bytes.empty());
  EXPECT_FALSE(run.planned_sent_bytes.has_value());
  EXPECT_EQ(run.params_sha256 + run.device + run.cpu + run.stopped_by, "abcpu");
}

TEST(RunRecord, ValidationsAreNoSteps) {
  const TempFolder folder;
  const std::size_t second = kSteps.find('\n') + 1;
  const RunRecord run = read_run_record(
      folder.write("log.jsonl", kSteps.substr(0, second) + "{\"step\":1,\"val_loss\":2.25}\n" +
                                    kSteps.substr(second) + kEnd));
  EXPECT_EQ(run.loss.size(), 2u);
  EXPECT_EQ(run.metrics.at("step_ms"), (std::vector<double>{10, 12}));
}

TEST(RunRecord, HasThePlanIfThereIsOne) {
  const TempFolder folder;
  const RunRecord run = read_run_record(folder.write(
      "log.jsonl", kSteps + R"({"final":{"params_sha256":"ab","stopped_by":"SIGINT","planned":)"
                            R"({"peak_bytes":{"total":11},"sent_bytes":7,"num_collectives":3}}})"));
  EXPECT_EQ(run.planned_peak_bytes, (BytesByCategory{{"total", 11}}));
  EXPECT_EQ(run.planned_sent_bytes, 7);
  EXPECT_EQ(run.planned_num_collectives, 3);
  EXPECT_EQ(run.stopped_by, "SIGINT");
}

TEST(RunRecord, OverlapIsThatOfTheStepsWithATrace) {
  const TempFolder folder;
  const auto end_with = [](const std::string& steps) {
    return R"({"final":{"params_sha256":"ab","trace":{"file":"t","steps":[)" + steps + "]}}}\n";
  };
  const RunRecord run = read_run_record(folder.write(
      "log.jsonl", kSteps + end_with(R"({"step":2,"comm_ms":4,"hidden_ms":3,"exposed_ms":1})")));
  const std::vector<double>& overlap = run.metrics.at("overlap");
  ASSERT_EQ(overlap.size(), 2u);
  EXPECT_TRUE(std::isnan(overlap[0]));
  EXPECT_EQ(overlap[1], 0.75);
  // Of one rank there is nothing to hide.
  const RunRecord alone = read_run_record(
      folder.write("log.jsonl", kSteps + end_with(R"({"step":2,"comm_ms":0,"hidden_ms":0})")));
  EXPECT_FALSE(alone.metrics.contains("overlap"));
  for (const char* none : {R"({"step":3,"comm_ms":4,"hidden_ms":3})",
                           R"({"step":0,"comm_ms":4,"hidden_ms":3})", R"({"comm_ms":4})"}) {
    EXPECT_TRUE(has(error_of_log(kSteps + end_with(none)),
                    {"expected a step of the run, got another", "trace"}))
        << none;
  }
  EXPECT_TRUE(has(error_of_log(kSteps + R"({"final":{"params_sha256":"ab","trace":{}}})"),
                  {"expected steps of the trace, got none"}));
}

TEST(RunRecord, WhatIsNoLogIsRefusedByItsLine) {
  EXPECT_TRUE(has(error_of_log(kSteps), {"expected a last record, got 2 steps and none"}));
  EXPECT_TRUE(has(error_of_log(kSteps + "{"), {"log.jsonl:3"}));
  EXPECT_TRUE(has(error_of_log(kSteps + kSteps + kEnd), {"expected step 3, got 1"}));
  EXPECT_TRUE(has(error_of_log(kSteps + kEnd + kEnd), {"expected nothing after the last record"}));
  EXPECT_TRUE(has(error_of_log("[1]\n"), {"expected an object, got array"}));
  EXPECT_TRUE(has(error_of_log(R"({"step":1})"), {"expected a loss, got none"}));
  EXPECT_TRUE(has(error_of_log(R"({"step":1,"loss":"2"})"), {"a number as loss"}));
  EXPECT_TRUE(has(error_of_log(R"({"step":1,"loss":2,"peak_bytes":{"total":-1}})"), {"a count"}));
  EXPECT_TRUE(has(error_of_log(kSteps + R"({"final":{}})"), {"expected params_sha256, got none"}));
  EXPECT_TRUE(has(error_of<engine::Error>([] { read_run_record("/nowhere"); }), {"/nowhere"}));
}

TEST(Spread, IsTheMedianAndTheMiddleHalf) {
  EXPECT_FALSE(spread_of({}).has_value());
  const Spread s = spread_of({4, 1, 3, 2, 100}).value();
  EXPECT_EQ(s.median, 3);
  EXPECT_EQ(s.q1, 2);
  EXPECT_EQ(s.q3, 4);
  EXPECT_EQ(spread_of({1, 2})->median, 1.5);
  EXPECT_EQ(spread_of({7})->q3, 7);
}

}  // namespace
}  // namespace tessera::tools

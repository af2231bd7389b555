// Every figure that a comparison prints or hands on, one by one: none takes the place of another.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/comparison/made_runs.h"
#include "tests/tools/compare/request/compare_request.h"
#include "tools/compare/comparison/comparison.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::has;
using testing::run_of;
using testing::TempFolder;

class Figures : public ::testing::Test {
 protected:
  Request request(const std::vector<std::string>& more) const {
    return testing::compare_request(folder_, 2, more);
  }
  const TempFolder folder_;
};

// A run no two figures of which are the same; one step is warm-up.
RunRecord run_of_primes() {
  RunRecord run = run_of({3.5, 2.25, 1.125}, "ab");
  run.metrics = {{"step_ms", {99, 20, 40}},        {"exposed_comm_ms", {99, 3, 5}},
                 {"compute_ms", {99, 11, 13}},     {"optimizer_ms", {99, 1, 2}},
                 {"data_ms", {99, 0.5, 1.5}},      {"tokens_per_s", {1, 1700, 1900}},
                 {"overlap", {0.01, 0.25, 0.5}},   {"sent_bytes", {7, 1 << 20, 3 << 20}},
                 {"num_collectives", {99, 23, 29}}};
  constexpr std::int64_t kMiB = 1 << 20;
  run.peak_bytes = {{"optimizer", 5 * kMiB}, {"total", 7 * kMiB}};
  run.host_peak_bytes = {{"gradient", 31}, {"total", 37}};
  run.planned_peak_bytes = {{"total", 11 * kMiB}};
  run.planned_sent_bytes = 13 * kMiB;
  run.planned_num_collectives = 41;
  run.device = "cpu";
  run.cpu = "v3";
  return run;
}

TEST_F(Figures, OfTheTableStandInTheirColumns) {
  const Request r = request({"--strategies=ddp", "--warmup_steps=1", "--train.steps=3"});
  EXPECT_EQ(
      table_text(summarise(r, {{{run_of_primes()}}})),
      "configuration  parity      loss   step ms [quartiles]  exposed ms  tokens/s  peak MiB  "
      "planned  sent MiB  planned  overlap %\n"
      "ddp            baseline  1.1250  30.00 [25.00, 35.00]        4.00      1800      7.00  "
      "  11.00      2.00    13.00         38\n");
}

TEST_F(Figures, OfTheJsonStandUnderTheirNames) {
  const Request r = request({"--strategies=ddp,hsdp:2", "--warmup_steps=1", "--train.steps=3",
                             "--rounds=2", "--tolerance=0.25"});
  RunRecord second = run_of_primes();
  second.loss = {3.5, 2.25, 1.25};
  const ordered_json json =
      to_json(summarise(r, {{{run_of_primes(), run_of_primes()}}, {{second, second}}}));
  EXPECT_EQ(json.at("rounds"), 2);
  EXPECT_EQ(json.at("warmup_steps"), 1);
  EXPECT_EQ(json.at("tolerance"), 0.25);
  EXPECT_EQ(json.at("steps"), 3);
  EXPECT_EQ(json.at("model"), testing::parse_ordered_json(
                                  R"({"preset":"small","parameters":3872,"layers":2,"dim":8})"));
  EXPECT_EQ(json.at("devices"), testing::parse_ordered_json(R"(["cpu, v3"])"));
  ordered_json row = json.at("configurations")[1];
  for (const char* text : {"options", "model"}) row.erase(text);
  EXPECT_EQ(row, testing::parse_ordered_json(R"({
      "name": "hsdp:2", "folder": "runs/hsdp_2", "state": "done", "same_plan_as": null, "class": 0,
      "failure": "", "rounds": 2, "strategy": "hsdp", "ranks": 4, "launch": null, "shard_ranks": 2, "steps": 3,
      "overrides": {"parallel.strategy": "hsdp", "parallel.shard_ranks": "2"},
      "parity": {"kind": "differs", "text": "loss differs by up to 0.12, first in step 3",
                 "reference": "ddp", "changes_arithmetic": [], "max_loss_difference": 0.125,
                 "first_step": 3, "equal_parameters": true},
      "params_sha256": ["ab", "ab"], "last_loss": 1.25,
      "metrics": {"step_ms": {"median": 30.0, "q1": 20.0, "q3": 40.0},
                  "exposed_comm_ms": {"median": 4.0, "q1": 3.0, "q3": 5.0},
                  "compute_ms": {"median": 12.0, "q1": 11.0, "q3": 13.0},
                  "optimizer_ms": {"median": 1.5, "q1": 1.0, "q3": 2.0},
                  "data_ms": {"median": 1.0, "q1": 0.5, "q3": 1.5},
                  "tokens_per_s": {"median": 1800.0, "q1": 1700.0, "q3": 1900.0},
                  "overlap": {"median": 0.375, "q1": 0.25, "q3": 0.5},
                  "sent_bytes": {"median": 2097152.0, "q1": 1048576.0, "q3": 3145728.0},
                  "num_collectives": {"median": 26.0, "q1": 23.0, "q3": 29.0}},
      "speed": {"tokens_per_s_of_rounds": [1800.0, 1800.0], "slower_percent": null},
      "step_parts_ms": {"compute_ms": 12.0, "exposed_comm_ms": 4.0, "optimizer_ms": 1.5,
                        "data_ms": 1.0, "other_ms": 11.5},
      "peak_bytes": {"optimizer": 5242880, "total": 7340032},
      "host_peak_bytes": {"gradient": 31, "total": 37},
      "planned": {"peak_bytes": {"total": 11534336}, "sent_bytes": 13631488, "num_collectives": 41},
      "on_pareto_front": null, "loss": [3.5, 2.25, 1.25], "loss_difference": [0.0, 0.0, 0.125]})"))
      << row;
}

}  // namespace
}  // namespace tessera::tools

// Trainings whose ranks are processes have the numbers of those whose ranks are threads, and leave
// what these leave.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/process_training.h"
#include "tests/tools/testing/strategy_cases.h"
#include "tools/probe/probe_record.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::kMlp;
using testing::kTransformer;
using testing::Outcome;

class ProcessesTest : public testing::ProcessTraining {
 protected:
  std::string of_processes(int num_processes, const Flags& more,
                           const std::string& program = kTransformer) {
    return sha256_of(start(num_processes, more, {}, program).wait());
  }
};

// Bits
// ------------------------------------------------------------------------------------------------

TEST_F(ProcessesTest, EveryStrategyHasTheBitsOfThreads) {
  for (const testing::StrategyCase& c : testing::strategy_cases()) {
    Flags options = c.options;
    options["parallel.strategy"] = c.strategy;
    for (const int n : {2, 3, 4}) {
      EXPECT_EQ(of_processes(n, options), of_threads(n, options)) << c.strategy << " on " << n;
    }
  }
}

TEST_F(ProcessesTest, OfTheOtherTrainerToo) {
  const Flags mlp = {{"device", "cpu"},       {"model.hidden", "8"}, {"train.steps", "3"},
                     {"train.batch", "4"},    {"log.every", "0"},    {"log.peak_ms", "0"},
                     {"out", folder_ / "run"}};
  flags_ = mlp;
  EXPECT_EQ(of_processes(3, {}, kMlp), of_threads(3, {}, kMlp));
}

// Checkpoints
// ------------------------------------------------------------------------------------------------

// Each step is of twelve sequences, dealt out to more or fewer ranks.
TEST_F(ProcessesTest, OtherNumbersOfProcessesAndThreadsGoOnFromACheckpoint) {
  flags_["model.dropout"] = "0.1";
  flags_["train.schedule"] = "constant";
  const std::string whole = of_threads(4, {{"train.accum", "3"}, {"train.steps", "8"}});
  const auto until = [&](const char* step, const char* accum, const char* strategy) -> Flags {
    return {{"train.steps", step},     {"train.accum", accum}, {"parallel.strategy", strategy},
            {"checkpoint.every", "2"}, {"resume", "auto"},     {"out", folder_ / "run"}};
  };
  of_processes(4, until("2", "3", "zero3"));
  const auto three = start(3, until("4", "4", "zero1")).wait();
  sha256_of(three);
  EXPECT_TRUE(has(three[0].out, {"resumed after step 2 of 4 ranks"}));
  Flags by_threads = until("6", "6", "ddp");
  by_threads["parallel.ranks"] = "2";
  const Outcome threads = run(by_threads);
  EXPECT_TRUE(has(threads.out, {"resumed after step 4 of 3 ranks"})) << threads.err;
  const auto four = start(4, until("8", "3", "hsdp")).wait();
  EXPECT_EQ(sha256_of(four), whole);
  EXPECT_TRUE(has(four[0].out, {"resumed after step 6 of 2 ranks"}));
  EXPECT_EQ(log_lines().size(), 9u);  // of all four, as of one run
}

// What a run leaves
// ------------------------------------------------------------------------------------------------

TEST_F(ProcessesTest, MeasureWhatIsPlanned) {
  flags_["audit"] = "true";
  flags_["train.accum"] = "2";
  for (const char* strategy : {"zero3", "zero2", "hsdp", "ddp"}) {
    const auto all = start(4, {{"parallel.strategy", strategy}}).wait();
    sha256_of(all);
    EXPECT_TRUE(has(all[0].out, {"audit of a step, rank 0", "3 steps are as planned on rank 0\n"}))
        << strategy;
  }
}

TEST_F(ProcessesTest, OneTellsWhatAllDo) {
  const auto all = start(3, {{"log.every", "1"}}).wait();
  sha256_of(all);
  EXPECT_TRUE(has(all[0].out, {"device: cpu, 3 ranks, gloo, ",
                               "\ntorchrun: 1 host x 3 processes x 1 thread, transport gloo\n",
                               "step     3/3 "}));
  for (const Outcome& outcome : all) EXPECT_EQ(without_waiting(outcome.err), "");
  EXPECT_EQ(log_lines().size(), 4u);
  EXPECT_EQ(final_record().at("ranks"), 3);
  EXPECT_EQ(final_record().at("backend"), "gloo");
  const auto plan = start(3, {{"plan", "true"}}).wait();
  for (const Outcome& outcome : plan) EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(
      has(plan[0].out, {", 3 ranks in 3 processes on CPUs\n", "memory of a step, per rank: "}));
  EXPECT_EQ(plan[1].out + plan[2].out, "");
}

// The ranks that a trace is of.
std::vector<std::string> ranks_in(const std::string& trace) {
  std::vector<std::string> ranks;
  for (const json& event : testing::parse_json(trace)) {
    if (event.at("name") == "process_name") ranks.push_back(event.at("args").at("name"));
  }
  return ranks;
}

TEST_F(ProcessesTest, EachTracesItself) {
  const auto all = start(2, {{"log.trace", folder_ / "trace.json"}}).wait();
  sha256_of(all);
  EXPECT_TRUE(has(all[0].out, {"\ntrace " + folder_ / "trace.json: communication "}));
  EXPECT_EQ(ranks_in(folder_.read("trace.json")), std::vector<std::string>{"rank 0"});
  EXPECT_EQ(ranks_in(folder_.read("trace.rank1.json")), std::vector<std::string>{"rank 1"});
}

// The line of the console about it.
std::string probe_line(const Outcome& outcome) {
  const std::size_t at = outcome.out.find("\nprobe ");
  const std::size_t end = outcome.out.find('\n', at + 1);
  return at == std::string::npos ? "none" : outcome.out.substr(at + 1, end - at - 1);
}

TEST_F(ProcessesTest, RecordTheChecksumsOfThreads) {
  const std::string path = folder_ / "probe.jsonl";
  for (const char* strategy : {"zero3", "ddp"}) {
    const Flags probed = {{"parallel.strategy", strategy},
                          {"train.accum", "2"},
                          {"log.probe", path},
                          {"log.probe_steps", "2:3"}};
    of_threads(2, probed);
    const auto all = start(2, probed).wait();
    sha256_of(all);
    const std::vector<std::string> lines = lines_of_record(path);
    EXPECT_EQ(lines, lines_of_record(folder_ / "threads.jsonl")) << strategy;
    EXPECT_EQ(probe_line(all[0]), fmt::format("probe {}: {} checksums of steps 2 to 3", path,
                                              engine::with_commas(std::ssize(lines) - 1)));
    EXPECT_EQ(folder_.read("probe.jsonl").find("\"rank\":1"), std::string::npos);
  }
}

// With zero3 a small tensor lies on one rank alone.
TEST_F(ProcessesTest, ATensorIsRecordedWhoeverHasIt) {
  const auto of = [&](const std::string& tensor) -> Flags {
    return {{"log.probe", folder_ / "probe.jsonl"}, {"log.probe_values", "updated:0:1:" + tensor}};
  };
  for (const char* tensor : {"h.0.ln_1.weight", "h.0.mlp.c_proj.bias"}) {
    of_threads(2, of(tensor));
    sha256_of(start(2, of(tensor)).wait());
    EXPECT_EQ(lines_of_record(folder_ / "probe.jsonl"), lines_of_record(folder_ / "threads.jsonl"));
  }
  for (const Outcome& outcome : start(2, of("nothing")).wait()) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"got none of 'updated:0:1:nothing' (log.probe_values)"}));
  }
}

// The update of step 1 is infinite, and so is what forward of step 2 computes with.
TEST_F(ProcessesTest, TheStepThatGoesWrongIsInTheRecord) {
  const std::string path = folder_ / "probe.jsonl";
  const Flags wrong = {{"train.lr", "1e30"}, {"train.schedule", "constant"}, {"log.probe", path}};
  for (const Outcome& outcome : start(2, wrong).wait()) EXPECT_EQ(outcome.exit_code, 1);
  const tools::ProbeRun record = tools::read_probe_run(path);
  EXPECT_TRUE(record.is_unfinished);
  EXPECT_EQ(record.last_step, 2);
}

}  // namespace
}  // namespace tessera

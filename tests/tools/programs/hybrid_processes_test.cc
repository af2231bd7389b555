// Trainings whose ranks are threads of several processes have the numbers of those whose ranks are
// threads of one, and leave what these leave.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/process_training.h"
#include "tests/tools/testing/strategy_cases.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Outcome;

class HybridProcessesTest : public testing::ProcessTraining {
 protected:
  // In each of `num_processes`.
  testing::Processes start_threads(int num_processes, int num_threads, Flags more) {
    more["parallel.threads"] = std::to_string(num_threads);
    return start(num_processes, more);
  }
};

TEST_F(HybridProcessesTest, EveryStrategyHasTheBitsOfThreads) {
  for (const testing::StrategyCase& c : testing::strategy_cases()) {
    Flags options = c.options;
    options["parallel.strategy"] = c.strategy;
    EXPECT_EQ(sha256_of(start_threads(2, 2, options).wait()), of_threads(4, options)) << c.strategy;
  }
}

// Three replicas of two ranks, where threads have two of three.
TEST_F(HybridProcessesTest, AReplicaIsAProcess) {
  const Flags hybrid = {{"parallel.strategy", "hsdp"}, {"log.every", "1"}};
  const auto all = start_threads(3, 2, hybrid).wait();
  EXPECT_EQ(sha256_of(all), of_threads(6, hybrid));
  EXPECT_TRUE(has(all[0].out, {"replicas of 2, one per process"})) << all[0].out;
}

TEST_F(HybridProcessesTest, OtherLayoutsGoOnFromACheckpoint) {
  flags_["model.dropout"] = "0.1";
  flags_["train.schedule"] = "constant";
  const auto until = [&](const char* step, const char* strategy) -> Flags {
    return {{"train.steps", step},
            {"parallel.strategy", strategy},
            {"checkpoint.every", "2"},
            {"resume", "auto"},
            {"out", folder_ / "run"}};
  };
  const std::string whole = of_threads(4, {{"train.steps", "8"}});
  sha256_of(start_threads(2, 2, until("2", "zero3")).wait());
  Flags by_threads = until("4", "zero1");
  by_threads["parallel.ranks"] = "4";
  const Outcome threads = run(by_threads);
  EXPECT_TRUE(has(threads.out, {"resumed after step 2 of 4 ranks"})) << threads.err;
  sha256_of(start(4, until("6", "ddp")).wait());
  const auto last = start_threads(2, 2, until("8", "hsdp")).wait();
  EXPECT_EQ(sha256_of(last), whole);
  EXPECT_TRUE(has(last[0].out, {"resumed after step 6 of 4 ranks"}));
}

TEST_F(HybridProcessesTest, MeasureWhatIsPlanned) {
  flags_["audit"] = "true";
  flags_["train.accum"] = "2";
  for (const char* strategy : {"zero3", "zero2", "hsdp", "ddp"}) {
    const auto all = start_threads(2, 2, {{"parallel.strategy", strategy}}).wait();
    sha256_of(all);
    EXPECT_TRUE(
        has(all[0].out, {"audit of a step, rank 0", "3 steps are as planned on each of 2 ranks\n"}))
        << strategy;
  }
}

TEST_F(HybridProcessesTest, OneTellsWhatAllDo) {
  const auto all = start_threads(2, 2, {{"log.every", "1"}, {"parallel.ranks", "4"}}).wait();
  sha256_of(all);
  EXPECT_TRUE(has(all[0].out, {"device: cpu, 4 ranks, gloo, ",
                               "\ntorchrun: 1 host x 2 processes x 2 threads, transport gloo\n",
                               "step     3/3 "}));
  for (const Outcome& outcome : all) EXPECT_EQ(without_waiting(outcome.err), "");
  EXPECT_EQ(log_lines().size(), 4u);
  EXPECT_EQ(final_record().at("ranks"), 4);
  EXPECT_EQ(final_record().at("backend"), "gloo");
}

TEST_F(HybridProcessesTest, RecordTheChecksumsOfThreads) {
  for (const char* strategy : {"zero3", "hsdp"}) {
    const Flags probed = {{"parallel.strategy", strategy}, {"log.probe", folder_ / "probe.jsonl"}};
    of_threads(4, probed);
    sha256_of(start_threads(2, 2, probed).wait());
    EXPECT_EQ(lines_of_record(folder_ / "probe.jsonl"), lines_of_record(folder_ / "threads.jsonl"))
        << strategy;
    EXPECT_TRUE(exists("probe.rank2.jsonl") && !exists("probe.rank1.jsonl"));
  }
}

TEST_F(HybridProcessesTest, ProcessesThatDifferSaySoOnce) {
  const auto threads = start(2, {},
                             {{0, {.flags = {{"parallel.threads", "2"}}}},
                              {1, {.flags = {{"parallel.threads", "3"}}}}})
                           .wait();
  for (const Outcome& outcome : threads) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"[join] expected the number of threads of process 0, 2, got 3"}));
  }
  flags_["parallel.threads"] = "2";
  const auto seeds = start(2, {}, {{1, {.flags = {{"train.seed", "7"}}}}}).wait();
  for (const Outcome& outcome : seeds) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"[launch] expected train.seed = 1337 in every process, as rank 0 "
                                  "has it, got 7 (rank 2)"}))
        << outcome.err;
  }
}

TEST_F(HybridProcessesTest, AProcessThatALauncherStartsAloneHasTheRanksThatAreAskedFor) {
  const auto one = start(1, {{"log.every", "1"}}).wait();
  EXPECT_EQ(sha256_of(one), of_threads(1, {}));
  EXPECT_TRUE(has(one[0].out, {"device: cpu, 1 rank, threads, ",
                               "\ntorchrun: 1 host x 1 process x 1 thread\n"}));
  EXPECT_EQ(sha256_of(start_threads(1, 3, {}).wait()), of_threads(3, {}));
}

}  // namespace
}  // namespace tessera

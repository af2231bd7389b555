// The program where configurations are of several arithmetics or trainings: whom it compares with
// whom, and what it does not train.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/smallest_budget.h"
#include "tests/tools/compare/tiny_comparison.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::TempFolder;

class CompareOfClasses : public ::testing::Test {
 protected:
  CompareOfClasses() : flags_(testing::tiny_comparison(folder_)) {}

  Outcome compare(const Flags& more) const {
    Flags flags = more;
    flags.insert(flags_.begin(), flags_.end());
    return testing::run_program("tools/compare/compare", flags);
  }
  json rows() const {
    return testing::parse_json(folder_.read("out/compare.json")).at("configurations");
  }
  /// A trainer that adds `option` where the folder of its run has `name` in it.
  std::string trainer_with(const std::string& name, const std::string& option) const {
    const std::string path = folder_.write(
        "trainer", "#!/bin/bash\nmore=\n[[ $2 == *" + name + "* ]] && more=" + option + "\nexec " +
                       fs::absolute("tools/programs/train_transformer").string() +
                       " \"$@\" $more\n");
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }
  /// What the program prints after its table.
  static std::vector<std::string> verdict_of(const std::string& out) {
    std::vector<std::string> lines;
    const std::size_t begin = out.rfind("\n\n") + 2, end = out.find("figures ", begin);
    for (std::size_t at = begin; at < end;) {
      const std::size_t stop = out.find('\n', at);
      lines.push_back(out.substr(at, stop - at));
      at = stop + 1;
    }
    return lines;
  }

  const TempFolder folder_;
  Flags flags_;
};

// Its losses stay far below the tolerance, so only the bits of its class tell.
TEST_F(CompareOfClasses, AStrategyThatIsWrongInOneArithmeticAloneIsNamed) {
  const Outcome outcome =
      compare({{"trainer", trainer_with("zero2_precision.param=bf16", "--train.weight_decay=0.2")},
               {"strategies", "ddp,zero2"},
               {"sweep", "precision.param=f32,bf16"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.out, {"Parity fails: zero2 precision.param=bf16 differs from ddp "
                                "precision.param=bf16 by up to "}))
      << outcome.out;
  EXPECT_TRUE(has(outcome.err, {"[parity]"}));
  EXPECT_EQ(verdict_of(outcome.out).size(), 1u);
  const json all = rows();
  EXPECT_LT(all[3].at("parity").at("max_loss_difference"), 0.001);
  EXPECT_EQ(all[1].at("parity").at("kind"), "within");
  EXPECT_EQ(all[2].at("parity").at("kind"), "equal bits");
  EXPECT_EQ(all[3].at("parity").at("kind"), "differs");
  EXPECT_TRUE(has(folder_.read("out/report.html"), {">Parity fails<"}));
}

TEST_F(CompareOfClasses, ASweepOfRatesHasLossesAndStrategiesHaveParity) {
  const Outcome holds = compare({{"sweep", "train.lr=1e-3,1"}});
  EXPECT_EQ(holds.exit_code, 0) << holds.out << holds.err;
  const std::vector<std::string> verdict = verdict_of(holds.out);
  ASSERT_EQ(verdict.size(), 3u);
  EXPECT_TRUE(has(verdict[0], {"Parity holds: the same bits within each of 2 classes",
                               "train.lr makes another training", " (train.lr=1.0)."}));
  EXPECT_TRUE(
      has(verdict[1], {"Fastest: too few rounds to say; 4 configurations need --rounds=8"}));
  EXPECT_GT(rows()[1].at("loss_difference").back(), 0.05) << "more than the tolerance";

  const Outcome fails =
      compare({{"sweep", "train.lr=1e-3,1"},
               {"out", folder_ / "b"},
               {"trainer", trainer_with("zero3_train.lr=1/", "--train.beta2=0.5")}});
  EXPECT_EQ(fails.exit_code, 1);
  EXPECT_TRUE(has(fails.out, {"Parity fails: zero3 train.lr=1 differs from ddp train.lr=1 by "}));
}

// Of these ddp and zero2 meet it only with smaller micro-batches, whose sums are rounded otherwise.
TEST_F(CompareOfClasses, ABudgetThatCutsTheMicroBatchesOfSomeIsNoLossOfParity) {
  Flags flags = {{"strategies", "ddp,zero2,zero3"}, {"train.batch", "4"}, {"memory_budget", "1kB"}};
  flags_.erase("sweep");
  flags["memory_budget"] = testing::smallest_budget(compare(flags).err);
  const Outcome outcome = compare(flags);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_TRUE(
      has(outcome.out, {"Parity holds: the same bits within each of 2 classes", "memory_budget"}))
      << outcome.out;
  const json all = rows();
  EXPECT_EQ(all[1].at("parity").at("kind"), "equal bits");
  EXPECT_EQ(all[2].at("parity").at("kind"), "within");
}

TEST_F(CompareOfClasses, WhatCannotDifferIsTrainedOnce) {
  const Outcome outcome = compare({{"strategies", "zero2"}, {"sweep", "parallel.prefetch=0,1,2"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out,
                  {"zero2 prefetch=1 has the same plan as zero2 prefetch=0 and is not trained\n",
                   "[1/1] zero2 prefetch=0: loss", "There is nothing to compare with."}))
      << outcome.out;
  EXPECT_FALSE(fs::exists(folder_ / "out/runs/zero2_prefetch=1/round-1"));
  EXPECT_TRUE(fs::exists(folder_ / "out/runs/zero2_prefetch=1/configuration.toml"));
  EXPECT_EQ(rows()[2].at("state"), "same plan");
}

// One program, one strategy, under two names that say nothing of it.
TEST_F(CompareOfClasses, RoundsAreInAnOrderOfTheirOwnAndTellWhenTheySuffice) {
  flags_["strategies"] = "zero3";
  flags_["sweep"] = "train.max_skips=2,3";
  flags_["train.steps"] = "2";
  const Outcome few = compare({});
  EXPECT_EQ(few.exit_code, 0) << few.err;
  EXPECT_TRUE(has(few.out, {"Fastest: too few rounds to say; 2 configurations need --rounds=6"}));
  const Outcome more = compare({{"rounds", "6"}, {"resume", "true"}});
  EXPECT_EQ(more.exit_code, 0) << more.err;
  EXPECT_TRUE(has(more.out, {"[1/12] zero3 train.max_skips=2, round 1: kept", "[12/12] ",
                             "slower % [interval]", "\nFastest: "}));
  const json all = testing::parse_json(folder_.read("out/compare.json"));
  EXPECT_TRUE(all.at("fastest").is_object());
  for (const json& row : all.at("configurations")) {
    EXPECT_EQ(row.at("speed").at("tokens_per_s_of_rounds").size(), 6u);
    EXPECT_TRUE(row.at("on_pareto_front").is_boolean());
  }
  int num_first = 0;  // rounds that the first configuration begins
  for (int round = 1; round <= 6; ++round) {
    const auto place = [&](int i) {
      return more.out.find(fmt::format("zero3 train.max_skips={}, round {}", i, round));
    };
    num_first += place(2) < place(3) ? 1 : 0;
  }
  EXPECT_GT(num_first, 0);
  EXPECT_LT(num_first, 6);
}

}  // namespace
}  // namespace tessera::tools

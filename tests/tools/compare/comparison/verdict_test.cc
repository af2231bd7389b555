// The verdict, the table and the JSON: who is named, and the figures that they say.
#include <gtest/gtest.h>

#include <algorithm>
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
using testing::rounds_of;
using testing::run_of;
using testing::TempFolder;
using Lines = std::vector<std::string>;

class Verdicts : public ::testing::Test {
 protected:
  Request request(std::vector<std::string> more) const {
    more.emplace_back("--warmup_steps=1");
    return testing::compare_request(folder_, 2, more);
  }
  Comparison summary(std::vector<Trained> trained) const {
    return summarise(three_, std::move(trained));
  }
  static Lines lines_of(const Request& r, const std::vector<RunRecord>& runs) {
    std::vector<Trained> trained;
    for (const RunRecord& run : runs) trained.push_back({{run}});
    return summarise(r, std::move(trained)).verdict.lines;
  }

  const TempFolder folder_;
  const Request three_ = request({"--strategies=ddp,zero2,zero3"});
  const RunRecord good_ = run_of({3, 2, 1}), bad_ = run_of({3, 2, 1}, "other");
};

// Parity
// -------------------------------------------------------------------------------------------

TEST_F(Verdicts, NameWhatDiffersFailedOrIsMissing) {
  const Comparison all = summary({{{good_}}, {{good_}}, {{good_}}});
  EXPECT_TRUE(all.verdict.passed() && all.verdict.complete);
  EXPECT_EQ(all.verdict.lines,
            (Lines{"Parity holds: all 3 configurations give the same bits (loss of every step, all "
                   "parameters at the end).",
                   "Fastest: too few rounds to say; 3 configurations need --rounds=7 (--resume "
                   "keeps what is trained).",
                   "Least memory: ddp; zero2; zero3, each with 1.00 MiB a rank."}));
  EXPECT_TRUE(has(table_text(all), {"baseline"}));

  const Comparison planted = summary({{{good_}}, {{bad_}}, {{good_}}});
  EXPECT_FALSE(planted.verdict.passed() || planted.verdict.agrees);
  EXPECT_TRUE(planted.verdict.complete);
  EXPECT_EQ(planted.verdict.lines,
            Lines{"Parity fails: zero2 ends with other parameters than ddp, after equal losses."});
  EXPECT_TRUE(has(table_text(planted), {"DIFFERS in parameters"}));

  const Comparison failed = summary({{{good_}}, {{}, "exit code 1"}, {{good_}}});
  EXPECT_FALSE(failed.verdict.passed() || failed.verdict.complete);
  EXPECT_TRUE(failed.verdict.agrees && failed.verdict.failed);
  EXPECT_EQ(failed.verdict.lines.at(1), "Failed: zero2.");

  const Comparison missing = summary({{{good_}}, {{good_}}, {}});
  EXPECT_TRUE(missing.verdict.passed());
  EXPECT_FALSE(missing.verdict.complete);
  EXPECT_EQ(missing.verdict.lines,
            (Lines{"Parity holds: both that were trained give the same bits (loss of every step, "
                   "all parameters at the end).",
                   "Not complete: 1 of 3 missing (zero3); --resume goes on."}));
  // Without the baseline the others are held to each other.
  const Comparison headless = summary({{}, {{good_}}, {{bad_}}});
  EXPECT_FALSE(headless.verdict.passed() || headless.verdict.complete || headless.verdict.agrees);
  EXPECT_EQ(headless.rows[2].parity.reference, "zero2");
  const Comparison all_at_once = summary({{{good_}}, {{bad_}}, {{}, "exit code 1"}});
  EXPECT_LE(all_at_once.verdict.lines.size(), 3u);
}

TEST_F(Verdicts, NameTheFirstDifferenceAndCountTheOthers) {
  const Request r = request({"--strategies=ddp,zero1,zero2,zero3,hsdp"});
  const RunRecord off = run_of({3, 2.0018, 1}, "other");
  EXPECT_EQ(lines_of(r, {good_, off, bad_, bad_, good_}),
            Lines{"Parity fails: zero1 differs from ddp by up to 1.8e-3, first in step 2; 2 more "
                  "differ."});
  EXPECT_EQ(lines_of(r, {good_, good_, off, good_, bad_}),
            Lines{"Parity fails: zero2 differs from ddp by up to 1.8e-3, first in step 2; 1 more "
                  "differs."});
  EXPECT_EQ(lines_of(r, {good_, good_, run_of({3, 2}), good_, good_}),
            Lines{"Parity fails: zero2 has another number of steps than ddp."});
}

TEST_F(Verdicts, CountWhatTheyDoNotName) {
  const Request five = request({"--strategies=ddp,zero1,zero2,zero3,hsdp"});
  EXPECT_EQ(lines_of(five, {good_, good_, good_, good_, good_}).back(),
            "Least memory: ddp; zero1; zero2; 2 more, each with 1.00 MiB a rank.");
  // A class of which one was trained is a class.
  const Request r = request({"--strategies=ddp,zero2", "--sweep=precision.param=f32,bf16"});
  const RunRecord half = run_of({3, 2.01, 1}, "half");
  const Comparison part = summarise(r, {{{good_}}, {{half}}, {{good_}}, {}});
  EXPECT_TRUE(has(part.verdict.lines.at(0), {"the same bits within each of 2 classes of equal"}))
      << part.verdict.lines.at(0);
}

TEST_F(Verdicts, ARunThatDoesNotRepeatItselfDiffers) {
  const Comparison all = summary({{{good_, good_}}, {{good_, run_of({3, 2.5, 1})}}, {{good_}}});
  EXPECT_TRUE(has(all.verdict.lines.at(0), {"zero2 differs from ddp by up to 0.5"}));
  const Request r = request({"--strategies=ddp", "--sweep=precision.param=f32,bf16"});
  const Comparison pair = summarise(r, {{{good_}}, {{run_of({3, 2.01, 1}), run_of({3, 2.02, 1})}}});
  EXPECT_TRUE(has(pair.verdict.lines.at(0),
                  {"ddp precision.param=bf16 differs from itself in another round by up to 0.01"}))
      << pair.verdict.lines.at(0);
}

// zero2 in bf16 is within the tolerance of f32, and has not the bits of ddp in bf16.
TEST_F(Verdicts, BitsAreComparedWithinAClassAndLossesBetween) {
  const Request r = request({"--strategies=ddp,zero2", "--sweep=precision.param=f32,bf16"});
  const RunRecord half = run_of({3, 2.01, 1}, "half"), wrong = run_of({3, 2.0118, 1}, "wrong");
  const auto summary_of = [&](const RunRecord& last) {
    return summarise(r, {{{good_}}, {{half}}, {{good_}}, {{last}}});
  };
  const Comparison holds = summary_of(half);
  EXPECT_TRUE(holds.verdict.passed());
  EXPECT_EQ(holds.verdict.lines.at(0),
            "Parity holds: the same bits within each of 2 classes of equal arithmetic; ddp "
            "precision.param=bf16 differs from ddp precision.param=f32 by up to 0.01 (0.05 "
            "allowed), first in step 2.");
  EXPECT_EQ(holds.rows[3].parity.kind, ParityKind::kEqualBits);
  EXPECT_TRUE(has(table_text(holds),
                  {"0.01 of 0.05 allowed", "class 1: precision.param=f32\n",
                   "class 2: precision.param=bf16 (against class 1: loss differs by up to 0.01, "
                   "first in step 2; 0.05 allowed, as precision.param changes the arithmetic)\n"}));

  // Equal losses have no distance that could be told.
  const RunRecord as_far = run_of({3, 2, 1}, "half");
  const std::string same_losses =
      table_text(summarise(r, {{{good_}}, {{as_far}}, {{good_}}, {{as_far}}}));
  EXPECT_TRUE(
      has(same_losses, {" other parameters at the end ", "equal losses, other parameters"}));
  EXPECT_FALSE(has(same_losses, {"parameters of"})) << same_losses;

  const Comparison fails = summary_of(wrong);
  EXPECT_FALSE(fails.verdict.passed());
  EXPECT_EQ(
      fails.verdict.lines,
      Lines{"Parity fails: zero2 precision.param=bf16 differs from ddp precision.param=bf16 by "
            "up to 1.8e-3, first in step 2."});
  const ordered_json json = to_json(fails);
  EXPECT_EQ(json.at("configurations")[3].at("class"), 1);
  EXPECT_EQ(json.at("configurations")[3].at("parity").at("reference"), "ddp precision.param=bf16");
  EXPECT_EQ(json.at("classes")[1], testing::parse_ordered_json(R"({
      "label": "precision.param=bf16",
      "configurations": ["ddp precision.param=bf16", "zero2 precision.param=bf16"],
      "reference": "ddp precision.param=bf16", "is_another_training": false,
      "measured_against": 0, "changes": ["precision.param"]})"));
  // Beyond the tolerance.
  const RunRecord far = run_of({3, 2.25, 1}, "half");
  EXPECT_EQ(
      summarise(r, {{{good_}}, {{far}}, {{good_}}, {{far}}}).verdict.lines,
      Lines{"Parity fails: ddp precision.param=bf16 differs from ddp precision.param=f32 by up "
            "to 0.25 (0.05 allowed), first in step 2."});
  // The first of a class that was trained stands for it.
  const Comparison second = summarise(r, {{{good_}}, {{}, "exit code 1"}, {{good_}}, {{half}}});
  EXPECT_EQ(second.rows[3].parity.kind, ParityKind::kWithin);
}

TEST_F(Verdicts, ASweepOfAnotherTrainingHasNoParityToFail) {
  const Request r = request({"--strategies=ddp", "--sweep=train.lr=1e-3,2e-3,4e-3"});
  const Comparison all = summarise(
      r, {{{run_of({3, 2, 1})}}, {{run_of({3, 9, 0.5}, "b")}}, {{run_of({3, 7, 7}, "c")}}});
  EXPECT_TRUE(all.verdict.passed());
  EXPECT_EQ(all.verdict.lines.at(0),
            "train.lr makes another training, with nothing to be equal; last losses 1 "
            "(train.lr=0.001), 0.5 (train.lr=0.002), 7 (train.lr=0.004).");
  EXPECT_EQ(all.rows[1].parity.kind, ParityKind::kAnother);
  EXPECT_TRUE(
      has(table_text(all), {"another training", "class 3: train.lr=0.004 (another training)"}));
  const ordered_json json = to_json(all);
  EXPECT_TRUE(json.at("configurations")[2].at("parity").at("max_loss_difference").is_null());
  EXPECT_EQ(json.at("classes")[2].at("is_another_training"), true);
  EXPECT_TRUE(json.at("classes")[2].at("measured_against").is_null());
  const Request grid = request({"--strategies=ddp", "--sweep=train.seed=1,2 train.beta1=0.5,0.75"});
  EXPECT_TRUE(has(lines_of(grid, {good_, good_, good_, good_}).at(0),
                  {"train.beta1, train.seed make another training"}));
  // Of two strategies each rate has its parity.
  const Request two = request({"--strategies=ddp,zero3", "--sweep=train.lr=1e-3,2e-3"});
  const RunRecord a = run_of({3, 2, 1}), b = run_of({3, 9, 0.5}, "b");
  EXPECT_TRUE(summarise(two, {{{a}}, {{b}}, {{a}}, {{b}}}).verdict.passed());
  EXPECT_TRUE(has(summarise(two, {{{a}}, {{b}}, {{a}}, {{a}}}).verdict.lines.at(0),
                  {"Parity fails: zero3 train.lr=2e-3 differs from ddp train.lr=2e-3"}));
}

TEST_F(Verdicts, WhatHasThePlanOfAnotherIsNotCounted) {
  Request r = request({"--strategies=ddp,zero3", "--sweep=parallel.prefetch=0,1"});
  r.configurations[1].same_plan_as = 0;
  const Comparison all = summarise(r, {{{good_}}, {}, {{good_}}, {{good_}}});
  EXPECT_TRUE(all.verdict.passed() && all.verdict.complete);
  EXPECT_TRUE(has(all.verdict.lines.at(0), {"all 3 that were trained give the same bits"}));
  EXPECT_TRUE(has(all.verdict.lines.at(1), {"3 configurations need --rounds=7"}));
  EXPECT_TRUE(has(table_text(all), {"same plan as ddp prefetch=0"}));
  const ordered_json row = to_json(all).at("configurations")[1];
  EXPECT_EQ(row.at("state"), "same plan");
  EXPECT_EQ(row.at("same_plan_as"), "ddp prefetch=0");
  EXPECT_TRUE(row.at("metrics").at("step_ms").is_null());
}

// Speed and memory
// -----------------------------------------------------------------------------------

std::vector<double> around(double speed) {
  std::vector<double> speeds;
  for (int i = 0; i < 8; ++i) speeds.push_back(speed + i);
  return speeds;
}

TEST_F(Verdicts, TheFastestHasTheMostTokensASecond) {
  // Twice the tokens in a step that takes longer.
  std::vector<RunRecord> large = rounds_of(around(218000)), small = rounds_of(around(78000));
  for (RunRecord& run : large) run.metrics["step_ms"] = {100, 100, 100};
  Request r = request({"--strategies=ddp", "--sweep=train.accum=1,6", "--rounds=8"});
  const Comparison all = summarise(r, {{small}, {large}});
  EXPECT_EQ(
      all.verdict.lines.at(1),
      "Fastest: ddp train.accum=6 with 218,004 tokens/s; the other is at least 179.5 % slower.");
  const ordered_json json = to_json(all);
  EXPECT_EQ(json.at("fastest"), testing::parse_ordered_json(
                                    R"({"name":"ddp train.accum=6","not_told_apart_from":[]})"));
  EXPECT_EQ(json.at("rounds_needed"), 6);
  EXPECT_TRUE(has(table_text(all), {"slower % [interval]", "fastest", "179.5 [179.5, 179.5]"}));
}

TEST_F(Verdicts, WhatNoiseHidesIsNotTold) {
  Request r = request({"--strategies=ddp,zero1,zero2,zero3", "--rounds=8"});
  const auto line = [&](const std::vector<std::vector<double>>& speeds) {
    std::vector<Trained> trained;
    for (const auto& of_rounds : speeds) trained.push_back({rounds_of(of_rounds)});
    return summarise(r, std::move(trained)).verdict.lines.at(1);
  };
  const std::vector<double> fast = around(1000), slow = around(900),
                            near = {1001, 1000, 1003, 1002, 1005, 1004, 1007, 1006};
  EXPECT_EQ(line({slow, fast, slow, slow}),
            "Fastest: zero1 with 1,004 tokens/s; all others are at least 11.0 % slower.");
  EXPECT_EQ(line({slow, fast, slow, near}),
            "Fastest: zero1 with 1,004 tokens/s; zero3 may be as fast (within noise); run more "
            "--rounds.");
  EXPECT_EQ(line({near, fast, slow, near}),
            "Fastest: ddp with 1,004 tokens/s; 2 others may be as fast (within noise); run more "
            "--rounds.");
  EXPECT_EQ(line({near, fast, fast, near}),
            "Fastest: none stands out; all 4 are as fast within noise (none more than 0.1 % slower "
            "than ddp).");
}

TEST_F(Verdicts, OneStepOrOneRoundNamesNoFastest) {
  const Comparison one = summary({{rounds_of({300})}, {rounds_of({100})}, {rounds_of({100})}});
  EXPECT_TRUE(has(one.verdict.lines.at(1), {"too few rounds to say"}));
  const ordered_json json = to_json(one);
  EXPECT_TRUE(json.at("fastest").is_null());
  EXPECT_EQ(json.at("rounds_needed"), 7);
  EXPECT_TRUE(json.at("configurations")[0].at("on_pareto_front").is_null());
  EXPECT_TRUE(json.at("configurations")[1].at("speed").at("slower_percent").is_null());
  EXPECT_FALSE(has(table_text(one), {"slower"}));
}

TEST_F(Verdicts, TheFrontLeavesOutWhatIsSurelyBeaten) {
  const std::vector<double> fast = around(1000), slow = around(900),
                            near = {1001, 1000, 1003, 1002, 1005, 1004, 1007, 1006};
  const Request r = request({"--strategies=ddp,zero1,zero2,zero3,hsdp", "--rounds=9"});
  const auto more = [](std::vector<double> speeds) {
    speeds.push_back(speeds.back());
    return speeds;
  };
  const Comparison all = summarise(r, {{rounds_of(more(fast), 100)},
                                       {rounds_of(more(near), 200)},
                                       {rounds_of(more(slow), 100)},
                                       {rounds_of(more(slow), 99)},
                                       {rounds_of(more(slow), 101)}});
  std::vector<bool> front;
  for (const Row& row : all.rows) front.push_back(row.is_on_front.value());
  EXPECT_EQ(front, (std::vector<bool>{true, true, false, true, false}))
      << "zero1 may be faster than ddp, and zero3 has less memory";
  EXPECT_TRUE(has(table_text(all), {"11.1 [11.0, 11.1]"}));
  const ordered_json slower = to_json(all).at("configurations")[2].at("speed").at("slower_percent");
  EXPECT_EQ(slower.at("told_apart"), true);
  EXPECT_NEAR(slower.at("median").get<double>(), 100 * (1004.0 / 904 - 1), 1e-9);
  EXPECT_NEAR(slower.at("low").get<double>(), 100 * (1007.0 / 907 - 1), 1e-9);
  EXPECT_NEAR(slower.at("high").get<double>(), 100 * (1000.0 / 900 - 1), 1e-9);
}

TEST_F(Verdicts, TheLeastMemoryIsThatOfAllThatHaveIt) {
  const auto line = [&](std::int64_t a, std::int64_t b, std::int64_t c) {
    return summary({{rounds_of({1}, a)}, {rounds_of({1}, b)}, {rounds_of({1}, c)}})
        .verdict.lines.at(2);
  };
  EXPECT_EQ(line(9 << 20, 5 << 19, 8 << 20), "Least memory: zero2 with 2.50 MiB a rank.");
  EXPECT_EQ(line(1 << 20, 5 << 20, 1 << 20),
            "Least memory: ddp; zero3, each with 1.00 MiB a rank.");
}

}  // namespace
}  // namespace tessera::tools

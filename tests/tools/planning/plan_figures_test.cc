// Figures that plans, budgets and audits print, each by hand and unlike all others, so that none
// can stand for another.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/planned_gpt.h"
#include "tools/planning/budget.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/planner.h"
#include "tools/programs/run/audit.h"

namespace tessera::tools {
namespace {

using engine::Category;
using testing::has;
using Lines = std::vector<std::string>;

std::string text_of(const Lines& lines) { return fmt::format("{}\n", fmt::join(lines, "\n")); }

TrainPlan one_step(std::int64_t peak_nbytes) {
  TrainPlan plan{};
  plan.steps.resize(1);
  plan.steps[0].memory.peak_total_nbytes = peak_nbytes;
  plan.steps[0].step_memory.peak_total_nbytes = peak_nbytes;
  plan.num_launches = 1;
  return plan;
}

TEST(PlanFigures, RatesStandNextToTheirUnits) {
  TrainPlan plan = one_step(1);
  plan.steps[0].step_ms = 11.25;
  plan.steps[0].exposed_comm_ms = 3.5;
  const PlanTarget target = {.num_ranks = 2,
                             .rates = {.flops_per_s = 123e9,
                                       .bytes_per_s = 45e9,
                                       .link_bytes_per_s = 6.7e9,
                                       .host_link_bytes_per_s = 8.9e9,
                                       .host_bytes_per_s = 1.2e9}};
  EXPECT_TRUE(has(text_of(plan_lines(plan, target)),
                  {"\nat 123 GFLOP/s, 45 GB/s of memory and 6.7 GB/s between ranks a step would "
                   "take 11.2 ms, 3.50 ms of it waiting for collectives\n"}));
  plan.uses_offload = true;
  EXPECT_TRUE(has(
      text_of(plan_lines(plan, target)),
      {"\nat 123 GFLOP/s, 45 GB/s of memory, 6.7 GB/s between ranks, 8.9 GB/s to the host and "
       "1.2 GB/s of its memory a step would take 11.2 ms, 3.50 ms of it waiting for collectives "
       "and the host\n"}));
}

TEST(PlanFigures, CollectivesStandWithTheirBytesAndWaits) {
  TrainPlan plan = one_step(1);
  plan.groups = {{0, 1}};
  plan.collectives = {{"all_gather", "h.0 forward", 1234567, 0, 2.5, 0.75},
                      {"reduce_scatter", "h.0 gradient", 89, 0, 4.5, 0.0004}};
  EXPECT_TRUE(
      has(text_of(plan_lines(plan, {.num_ranks = 2})),
          {"\n  all_gather     h.0 forward                        1,234,567 B  compute waits 750.0 "
           "us\n",
           "\n  reduce_scatter h.0 gradient                              89 B\n"}));
  const auto json = testing::parse_json(plan_record(plan, {.num_ranks = 2}).text());
  const auto& first = json.at("collectives").at(0);
  EXPECT_EQ(first.at("sent_bytes"), 1234567);
  EXPECT_EQ(first.at("end_ms"), 2.5);
  EXPECT_EQ(first.at("exposed_ms"), 0.75);
  EXPECT_EQ(first.at("label"), "h.0 forward");
}

TEST(PlanFigures, RecordsHaveTheirOwnNames) {
  TrainPlan plan = one_step(1000);
  plan.hash = 0xabc;
  plan.steps[0].step_ms = 11;
  plan.steps[0].exposed_comm_ms = 3;
  plan.steps[0].step_memory.peak_nbytes[static_cast<int>(Category::kGradient)] = 70;
  plan.steps[0].step_host_memory.peak_nbytes[static_cast<int>(Category::kOptimizer)] = 80;
  plan.between_steps_nbytes = 600;
  plan.unrecorded = {{"validation", 500}};
  plan.num_launches = 21;
  const auto json = testing::parse_json(plan_record(plan, {.num_ranks = 3}).text());
  EXPECT_EQ(json.at("hash"), "0000000000000abc");
  EXPECT_EQ(json.at("ranks"), 3);
  EXPECT_EQ(json.at("step_ms"), 11);
  EXPECT_EQ(json.at("exposed_comm_ms"), 3);
  EXPECT_EQ(json.at("peak_bytes").at("gradient"), 70);
  EXPECT_EQ(json.at("host_peak_bytes").at("optimizer"), 80);
  EXPECT_EQ(json.at("between_steps_bytes"), 600);
  EXPECT_EQ(json.at("validation_peak_bytes"), 500);
  EXPECT_EQ(json.at("num_launches"), 21);
}

// The arithmetic of five categories of which three are shown, and of five terms three.
TEST(PlanFigures, TheLargestAreShownInTheirOrder) {
  TrainPlan plan = one_step(3 << 20);
  plan.peak_at = "gelu, h.3 forward";
  plan.memory = {{Category::kParameterShard, 50, {{"p", 50}}},
                 {Category::kGradient, 300, {{"a", 20}, {"b", 150}, {"c", 100}, {"d", 30}}},
                 {Category::kOptimizer, 2 << 20, {{"o", 2 << 20}}},
                 {Category::kActivation, 100, {{"x", 60}, {"y", 40}}},
                 {Category::kWorkspace, 99, {{"w", 99}}}};
  EXPECT_EQ(largest_lines(plan),
            (Lines{"the largest of the last, which needs most at gelu, h.3 forward:",
                   "  optimizer                 2,097,152 B       2.0 MiB",
                   "                            2,097,152 B  = o",
                   "  gradient                        300 B         300 B",
                   "                                  150 B  = b",
                   "                                  100 B  = c",
                   "                                   30 B  = d",
                   "  activation                      100 B         100 B",
                   "                                   60 B  = x",
                   "                                   40 B  = y"}));
  plan.between_steps_nbytes = (3 << 20) + 1;
  plan.unrecorded = {{"validation", 4 << 20}};
  const Lines more = largest_lines(plan);
  ASSERT_EQ(more.size(), 12u);
  EXPECT_EQ(more[10], "  validation, in all        4,194,304 B       4.0 MiB");
  EXPECT_EQ(more[11], "  between steps             3,145,729 B       3.0 MiB");
  EXPECT_TRUE(has(text_of(memory_lines(plan)),
                  {"memory of a step, per rank: 3.0 MiB; most at gelu", more[10], more[11]}));
}

// Each of what a run does may need most.
TEST(PlanFigures, ThePeakIsOfAllThatARunDoes) {
  TrainPlan plan = one_step(10);
  EXPECT_EQ(peak_nbytes(plan), 10);
  plan.between_steps_nbytes = 11;
  EXPECT_EQ(peak_nbytes(plan), 11);
  plan.unrecorded = {{"validation", 12}, {"other", 3}};
  EXPECT_EQ(peak_nbytes(plan), 12);
  plan.unrecorded = {{"validation", 3}, {"other", 13}};
  EXPECT_EQ(peak_nbytes(plan), 13);
  plan.repeated = plan.steps[0];
  plan.repeated->memory.peak_total_nbytes = 14;
  EXPECT_EQ(peak_nbytes(plan), 14);
}

// A hook compresses from the sixth step on: steps 1, 2 to 5, 6, 7 and later.
TEST(PlanFigures, EachStepHasItsOwnPlan) {
  TrainPlan plan{};
  for (const int ms : {1, 2, 3, 4}) plan.steps.push_back({.step_ms = static_cast<double>(ms)});
  plan.resumed = {{.step_ms = 8}, {.step_ms = 9}};
  plan.compresses_after = 5;
  const auto ms = [&](std::int64_t step, std::int64_t start) {
    return planned_step(plan, step, start).step_ms;
  };
  EXPECT_EQ((std::vector<double>{ms(1, 0), ms(2, 0), ms(5, 0), ms(6, 0), ms(7, 0), ms(99, 0)}),
            (std::vector<double>{1, 2, 2, 3, 4, 4}));
  EXPECT_EQ((std::vector<double>{ms(4, 3), ms(5, 3), ms(6, 3), ms(7, 3)}),
            (std::vector<double>{1, 2, 3, 4}));
  EXPECT_EQ((std::vector<double>{ms(6, 5), ms(7, 5), ms(9, 8), ms(10, 8)}),
            (std::vector<double>{8, 9, 8, 9}));
  plan.compresses_after = 0;
  EXPECT_EQ((std::vector<double>{ms(1, 0), ms(2, 0), ms(8, 7), ms(9, 7)}),
            (std::vector<double>{1, 2, 1, 2}));
}

TEST(BudgetFigures, EachWayHasItsBytesAndItsTime) {
  const BudgetPlan plan = {.config = {},
                           .rungs = {{"as asked", 21 << 20, 85263.4, false},
                                     {"a", 3000, 90.26, true},
                                     {"b", 2999, 80, true}},
                           .options = {{"parallel.prefetch", "0"}},
                           .num_plans = 7,
                           .remark = "rounded"};
  EXPECT_EQ(lines_of(plan, 3000),
            (Lines{"memory budget of 3,000 bytes (2.9 KiB) per rank:",
                   "        22,020,096 B      21.0 MiB      85.3 s  too much  as asked",
                   "             3,000 B       2.9 KiB     90.3 ms  fits      a",
                   "             2,999 B       2.9 KiB     80.0 ms  chosen    b", "  rounded"}));
  const auto json = testing::parse_json(budget_record(plan, 3000).text());
  EXPECT_EQ(json.at("bytes"), 3000);
  EXPECT_EQ(json.at("num_plans"), 7);
  EXPECT_EQ(json.at("remark"), "rounded");
  EXPECT_EQ(json.at("options").at("parallel.prefetch"), 0);
  EXPECT_EQ(json.at("rungs").at(0).at("fits"), false);
  EXPECT_EQ(json.at("rungs").at(1).at("fits"), true);
  EXPECT_EQ(json.at("rungs").at(1).at("peak_bytes"), 3000);
  EXPECT_EQ(json.at("rungs").at(1).at("step_ms"), 90.26);
  EXPECT_EQ(json.at("rungs").at(2).at("what"), "b");
}

TEST(AuditFigures, PlannedStandsLeftOfMeasured) {
  TrainPlan plan{};
  plan.steps.resize(2);
  StepRecord& planned = plan.steps[0];
  planned.traffic = {.num_collectives = 12, .bytes_sent = 3456};
  planned.step_memory.peak_nbytes[static_cast<int>(Category::kGradient)] = 7890;
  planned.step_memory.peak_total_nbytes = 11111;
  planned.step_host_memory.peak_nbytes[static_cast<int>(Category::kOptimizer)] = 222;
  Audit audit(plan, {.num_ranks = 4, .rank = 3}, 0);
  StepRecord measured = planned;
  measured.step = 1;
  measured.traffic = {.num_collectives = 13, .bytes_sent = 3457};
  measured.step_memory.peak_nbytes[static_cast<int>(Category::kGradient)] = 7891;
  measured.step_host_memory.peak_nbytes[static_cast<int>(Category::kOptimizer)] = 223;
  audit.add(measured);
  EXPECT_EQ(audit.lines(),
            (Lines{"audit of a step, rank 3              planned          measured",
                   "  bytes sent                           3,456             3,457  DIFFERS",
                   "  collectives                             12                13  DIFFERS",
                   "  gradient                             7,890             7,891  DIFFERS",
                   "  all memory                          11,111            11,111",
                   "  host: optimizer                        222               223  DIFFERS",
                   "step 1 is not as planned"}));
}

// Micro-steps of one unit count together, the six with most are named, and the rest is a sum.
TEST(AuditFigures, WaitsAreSummedByGather) {
  TrainPlan plan = one_step(1);
  const auto add = [&](const std::string& name, const std::string& label, double ms) {
    plan.collectives.push_back({name, label, 1, 0, 0, ms});
  };
  add("all_gather", "h.0 forward", 1);
  add("all_gather", "h.0 forward", 0.5);
  add("all_gather", "h.1 forward", 2);
  add("all_gather", "h.2 backward", 0.0004);  // too little to be shown
  add("all_gather", "losses", 100);
  add("reduce_scatter", "h.1 gradient", 100);
  for (int i = 3; i < 9; ++i) add("all_gather", fmt::format("h.{} update", i), 0.1 * i);
  EXPECT_EQ(Audit(plan, {.num_ranks = 2}, 0).gathers_line(),
            "gathers not hidden in the plan, at --rates.*: h.1 forward 2.000 ms, h.0 forward 1.500 "
            "ms, h.8 update 0.800 ms, h.7 update 0.700 ms, h.6 update 0.600 ms, h.5 update 0.500 "
            "ms, 2 more 0.700 ms");
}

// Where masters lie on the host a whole parameter is put together while there is a copy of what
// this rank owns of it: here that is more than a step takes, and as much is enough to the end of a
// run.
TEST(PlanFigures, WholeParametersHaveRoomForTheirCopies) {
  constexpr GptConfig kWide = {.layers = 1, .heads = 1, .dim = 64, .seq = 4, .vocab = 4096};
  TrainConfig config = testing::base(2);
  config.parallel.strategy = "ddp";
  config.precision.param = engine::DType::kBF16;
  config.precision.accumulate = engine::DType::kF32;
  config.parallel.prefetch = config.parallel.reductions_in_flight = 0;
  config.offload = {.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 1};
  config.train.steps = 1;
  const TrainPlan plan = testing::plan_of(config, kWide);
  const std::int64_t largest = 4 * kWide.vocab * kWide.dim;
  const std::int64_t between = plan.between_steps_nbytes;
  const testing::TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("tokens.bin", std::string(400, '\1'))),
                          {.seq = kWide.seq, .vocab = kWide.vocab});
  ASSERT_LT(plan.steps.back().memory.peak_total_nbytes, between);
  const auto run_within = [&](std::int64_t nbytes) {
    config.memory_budget = std::to_string(nbytes);
    return testing::run_gpt(config, kWide, data).params_sha256;
  };
  EXPECT_NO_THROW(run_within(between));
  EXPECT_THROW(run_within(between - largest / 2), engine::Error);
}

}  // namespace
}  // namespace tessera::tools

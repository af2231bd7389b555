// What a plan says of who sends to whom.
#include "tools/train/plan_report.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tools/models/gpt.h"
#include "tools/train/planner.h"

namespace tessera::tools {
namespace {

using engine::DType;
using Ranks = std::vector<int>;

TrainPlan plan_of(const char* strategy, int num_ranks) {
  const GptConfig sizes = {.layers = 2, .heads = 2, .dim = 32, .seq = 16, .vocab = 64};
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = num_ranks;
  config.parallel.strategy = strategy;
  config.train.batch = 1;
  Gpt model(sizes);
  const engine::Shape shape{config.train.batch, sizes.seq};
  return make_plan(config, {.num_ranks = num_ranks}, model,
                   {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
}

// Parameters and gradients within a replica, sums of shards that replicas hand on, and a few values
// of all.
TEST(PlanReport, SaysWhatGoesBetweenWhichRanks) {
  const TrainPlan plan = plan_of("hsdp", 6);  // 2 replicas of 3
  std::map<Ranks, std::set<std::string>> names;
  std::map<Ranks, std::int64_t> sent;
  std::map<Ranks, int> count;
  for (const PlannedCollective& c : plan.collectives) {
    names[c.ranks].insert(c.name);
    sent[c.ranks] += c.bytes_sent;
    ++count[c.ranks];
  }
  const Ranks replica = {0, 1, 2}, across = {0, 3}, world = {0, 1, 2, 3, 4, 5};
  EXPECT_EQ(names,
            (std::map<Ranks, std::set<std::string>>{{replica, {"all_gather", "reduce_scatter"}},
                                                    {across, {"broadcast"}},
                                                    {world, {"all_gather"}}}));
  // A reduce-scatter sends two thirds of a unit, and two broadcasts half of the last third each.
  std::int64_t scattered = 0;
  for (const PlannedCollective& c : plan.collectives) {
    if (c.name == "reduce_scatter") scattered += c.bytes_sent;
  }
  EXPECT_EQ(sent[across], scattered / 2);

  const std::vector<std::string> lines = plan_lines(plan, {.num_ranks = 6});
  for (const auto& [ranks, name] :
       std::map<Ranks, std::string>{{replica, "0 to 2"}, {across, "0, 3"}, {world, "0 to 5"}}) {
    const auto line = std::ranges::find_if(
        lines, [&, text = fmt::format("between ranks {} ", name)](const std::string& l) {
          return l.find(text) != std::string::npos;
        });
    ASSERT_NE(line, lines.end()) << fmt::format("{}", fmt::join(lines, "\n"));
    EXPECT_TRUE(testing::has(*line, {fmt::format(" in {} collective", count[ranks])}));
  }
  const auto collectives =
      nlohmann::json::parse(plan_record(plan, {.num_ranks = 6}).text()).at("collectives");
  for (std::size_t i = 0; i < plan.collectives.size(); ++i) {
    EXPECT_EQ(collectives.at(i).at("ranks").get<Ranks>(), plan.collectives[i].ranks);
  }
}

TEST(PlanReport, SaysNothingOfRanksThatAllTakePartInEverything) {
  for (const std::string& line : plan_lines(plan_of("zero3", 4), {.num_ranks = 4})) {
    EXPECT_EQ(line.find("  between ranks "), std::string::npos) << line;
  }
}

// A run whose hook compresses from the fourth step on, and whose guard makes steps again: figures
// that are all different, so that none can stand for another.
TEST(PlanReport, SaysEachFigureOfItsOwnStep) {
  TrainPlan plan{};
  for (const int i : {1, 2, 3, 4}) {
    StepRecord step{.step = i};
    step.traffic = {.num_collectives = 10 * i, .bytes_sent = std::int64_t{i} << 20};
    step.step_memory.peak_total_nbytes = 100 * i;
    step.step_host_memory.peak_total_nbytes = 1000 * i;
    plan.steps.push_back(step);
  }
  plan.compresses_behind = 3;
  plan.repeated = plan.steps.back();
  plan.repeated->step_memory.peak_total_nbytes = 77;
  plan.repeated->step_host_memory.peak_total_nbytes = 88;
  plan.collectives = {{"all_gather", "a", 5, {0, 2, 4}, 0},
                      {"all_gather", "b", 7, {0, 1, 2}, 0},
                      {"all_reduce", "c", 9, {0, 2, 4}, 0}};
  plan.num_launches = 1000;
  plan.host_ms = 12;
  std::string text;
  for (const std::string& line : plan_lines(plan, {.num_ranks = 6})) text += line + "\n";
  EXPECT_TRUE(testing::has(
      text, {"a step sends 4.0 MiB in 40 collectives (the first: 1.0 MiB in 10):\n",
             "\n  up to step 3, before its hook compresses, 2.0 MiB in 20 collectives\n",
             "between ranks 0 to 2 ", " 7 B in 1 collective\n", "between ranks 0, 2, 4 ",
             " 14 B in 2 collectives\n", "which took this host 12.0 ms (12.00 us each)\n"}));
  const auto record = nlohmann::json::parse(plan_record(plan, {.num_ranks = 6}).text());
  EXPECT_EQ(record.at("sent_bytes"), 4 << 20);
  EXPECT_EQ(record.at("num_collectives"), 40);
  EXPECT_EQ(record.at("first_step_sent_bytes"), 1 << 20);
  EXPECT_EQ(record.at("first_step_num_collectives"), 10);
  EXPECT_EQ(record.at("peak_bytes").at("total"), 400);
  EXPECT_EQ(record.at("host_peak_bytes").at("total"), 4000);
  EXPECT_EQ(record.at("repeated_peak_bytes").at("total"), 77);
  EXPECT_EQ(record.at("host_ms"), 12);
}

}  // namespace
}  // namespace tessera::tools

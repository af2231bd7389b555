// What a plan says of who sends to whom.
#include "tools/planning/plan_report.h"
#include "tests/testing/json.h"

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
#include "tools/planning/planner.h"

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
    const Ranks& ranks = plan.groups.at(c.group);
    names[ranks].insert(c.name);
    sent[ranks] += c.bytes_sent;
    ++count[ranks];
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
  const auto record = testing::parse_json(plan_record(plan, {.num_ranks = 6}).text());
  EXPECT_EQ(record.at("groups").get<std::vector<Ranks>>(), plan.groups);
  for (std::size_t i = 0; i < plan.collectives.size(); ++i) {
    EXPECT_EQ(record.at("collectives").at(i).at("group"), plan.collectives[i].group);
  }
}

TEST(PlanReport, SaysNothingOfRanksThatAllTakePartInEverything) {
  for (const std::string& line : plan_lines(plan_of("zero3", 4), {.num_ranks = 4})) {
    EXPECT_EQ(line.find("  between ranks "), std::string::npos) << line;
  }
}

TEST(PlanReport, ExplainsWhatAStepSendsByItsCollectives) {
  const TrainPlan plan = plan_of("zero3", 4);
  const std::vector<PlanTerm> terms = sent_terms(plan);
  std::int64_t sum = 0;
  for (const PlanTerm& term : terms) sum += term.nbytes;
  EXPECT_EQ(sum, plan.steps.back().traffic.bytes_sent);
  // 12,704 parameters of a block are padded to 13,312, of which a rank sends three quarters.
  const auto forward =
      std::ranges::find(terms, "2 x 39,936 B, all_gather h.0, h.1 forward", &PlanTerm::text);
  ASSERT_NE(forward, terms.end()) << terms.front().text;
  EXPECT_EQ(forward->nbytes, 2 * 39'936);
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
  plan.compresses_after = 3;
  plan.repeated = plan.steps.back();
  plan.repeated->step_memory.peak_total_nbytes = 77;
  plan.repeated->step_host_memory.peak_total_nbytes = 88;
  plan.groups = {{0, 2, 4}, {0, 1, 2}};
  plan.collectives = {{"all_gather", "a", 5, 0, 0, 0.25},
                      {"all_gather", "b", 7, 1, 0},
                      {"all_reduce", "c", 9, 0, 0, 1.5}};
  plan.steps.back().step_ms = 250;
  plan.steps.back().exposed_comm_ms = 1.75;
  plan.num_launches = 1000;
  plan.host_ms = 12;
  std::string text;
  const PlanTarget target = {
      .num_ranks = 6,
      .rates = {
          .flops_per_s = 7e12, .bytes_per_s = 3e9, .link_bytes_per_s = 2.5e7, .link_latency_s = 1}};
  for (const std::string& line : plan_lines(plan, target)) text += line + "\n";
  EXPECT_TRUE(testing::has(
      text, {"a step sends 4.0 MiB in 40 collectives (the first: 1.0 MiB in 10):\n",
             "\n  up to step 3, before its hook compresses, 2.0 MiB in 20 collectives\n",
             "between ranks 0 to 2 ", " 7 B in 1 collective\n", "between ranks 0, 2, 4 ",
             " 14 B in 2 collectives\n", "a step has 1,000 launches",
             "which took this host 12.0 ms (12.0 us each)\n",
             "at 7 TFLOP/s, 3 GB/s of memory and 25 MB/s between ranks a step would take 250.0 ms",
             ", 1.75 ms of it waiting for collectives\n", " 5 B  compute waits 250.0 us\n",
             " 9 B  compute waits 1.50 ms\n"}));
  const auto record = testing::parse_json(plan_record(plan, {.num_ranks = 6}).text());
  EXPECT_EQ(record.at("sent_bytes"), 4 << 20);
  EXPECT_EQ(record.at("num_collectives"), 40);
  EXPECT_EQ(record.at("first_step_sent_bytes"), 1 << 20);
  EXPECT_EQ(record.at("first_step_num_collectives"), 10);
  EXPECT_EQ(record.at("peak_bytes").at("total"), 400);
  EXPECT_EQ(record.at("host_peak_bytes").at("total"), 4000);
  EXPECT_EQ(record.at("repeated_peak_bytes").at("total"), 77);
  EXPECT_EQ(record.at("host_ms"), 12);
  EXPECT_EQ(record.at("num_launches"), 1000);
  EXPECT_EQ(record.at("step_ms"), 250);
  EXPECT_EQ(record.at("exposed_comm_ms"), 1.75);
  EXPECT_EQ(record.at("collectives").at(2).at("sent_bytes"), 9);
  EXPECT_EQ(record.at("collectives").at(2).at("exposed_ms"), 1.5);
}

// Of three units with as many bytes each, called in two micro-steps, and of others that are not
// alike: by bytes, by ranks, by name.
TEST(PlanReport, CollectivesThatAreAlikeStandOnOneLine) {
  TrainPlan plan{};
  plan.steps.resize(2);
  plan.groups = {{0, 1}, {0, 2}};
  for (const char* unit : {"h.0", "h.1", "h.2", "h.0", "h.1", "h.2"}) {
    plan.collectives.push_back({"all_gather", fmt::format("{} forward", unit), 1 << 20, 0, 0, 0.5});
    plan.collectives.push_back({"all_gather", fmt::format("{} backward", unit), 1 << 20, 1, 0});
  }
  plan.collectives.push_back({"all_gather", "h.7 backward", 1 << 20, 1, 0});
  plan.collectives.push_back({"all_gather", "h.3 forward", 1000, 0, 0});
  plan.collectives.push_back({"all_gather", "h.4 forward", 1 << 20, 1, 0});
  plan.collectives.push_back({"broadcast", "h.5 forward", 1 << 20, 0, 0});
  plan.collectives.push_back({"broadcast", "h.5 forward", 1 << 20, 0, 0});
  plan.collectives.push_back({"all_gather", "root forward", 1 << 20, 0, 0});
  std::vector<std::string> lines = plan_lines(plan, {.num_ranks = 4});
  std::erase_if(lines, [](const std::string& line) {
    return line.find("all_gather") == std::string::npos &&
           line.find("broadcast") == std::string::npos;
  });
  const std::string first =
      "  6 x all_gather     h.0 to h.2 forward                 1,048,576 B each, 6.0 MiB"
      "  compute waits 3.00 ms";
  EXPECT_EQ(lines,
            (std::vector<std::string>{
                first,
                "  7 x all_gather     4 of h.0 to h.7 backward           1,048,576 B each, 7.0 MiB",
                "      all_gather     h.3 forward                            1,000 B",
                "      all_gather     h.4 forward                        1,048,576 B",
                "  2 x broadcast      h.5 forward                        1,048,576 B each, 2.0 MiB",
                "      all_gather     root forward                       1,048,576 B"}));
}

// Lists of ranks that are thousands long are kept once, and said in short.
TEST(PlanReport, ThousandsOfRanksTakeAFewLists) {
  const TrainPlan plan = plan_of("hsdp", 16384);
  EXPECT_EQ(plan.groups.size(), 3u);
  for (const std::string& line : plan_lines(plan, {.num_ranks = 16384})) {
    EXPECT_LT(line.size(), 160u);
  }
}

}  // namespace
}  // namespace tessera::tools

// Which steps the page draws, and that what it draws of a plan is the plan.
#include "tools/compare/page/shown_steps.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/request/compare_request.h"
#include "tools/compare/comparison/comparison.h"
#include "tools/compare/equal_plans.h"
#include "tools/compare/request/request.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::has;
using testing::TempFolder;

class ShownSteps : public ::testing::Test {
 protected:
  Request request(const std::vector<std::string>& more) const {
    return testing::compare_request(folder_, 3, more);
  }

  /// All were trained but those in `untrained`; those in `traced` left a trace of one slice.
  ordered_json shown(const Request& r, const std::vector<std::size_t>& traced = {},
                     const std::vector<std::size_t>& untrained = {}) {
    Comparison comparison;
    std::vector<std::string> folders;
    for (std::size_t i = 0; i < r.configurations.size(); ++i) {
      comparison.rows.push_back({.configuration = &r.configurations[i]});
      const std::string name = "run-" + std::to_string(i);
      folders.push_back(std::ranges::count(untrained, i) > 0 ? "" : folder_ / name);
      if (std::ranges::count(traced, i) == 0) continue;
      std::filesystem::create_directories(folder_ / name);
      folder_.write(name + "/trace.json", R"([{"ph":"X","pid":0,"tid":1,"ts":0,"dur":5,"name":"a"},
          {"ph":"C","pid":0,"ts":1,"name":"memory total","args":{"bytes":3}}])");
    }
    warnings_.clear();
    return steps_to_show(comparison, folders, warnings_);
  }

  static std::vector<std::string> names(const ordered_json& steps) {
    std::vector<std::string> result;
    for (const ordered_json& step : steps) {
      result.push_back(step.at("source").get<std::string>() + " " +
                       step.at("name").get<std::string>());
    }
    return result;
  }
  /// The steps whose streams are drawn first.
  static std::vector<std::string> drawn(const ordered_json& shown) {
    ordered_json steps = ordered_json::array();
    for (const std::size_t i : shown.at("streams")) steps.push_back(shown.at("steps").at(i));
    return names(steps);
  }
  static double busy_ms(const ordered_json& step, const std::string& thread) {
    double sum = 0;
    for (const ordered_json& t : step.at("threads")) {
      if (t.at("name") != thread) continue;
      for (const ordered_json& slice : t.at("slices")) sum += slice[1].get<double>();
    }
    return sum;
  }

  const TempFolder folder_;
  std::vector<std::string> warnings_;
};

using Names = std::vector<std::string>;

TEST_F(ShownSteps, GathersAheadAreAboveTheSameWithout) {
  const Request r = request(
      {"--strategies=ddp,zero3", "--sweep=parallel.prefetch=0,2", "--sweep=train.accum=1,2"});
  const ordered_json steps = shown(r);
  EXPECT_EQ(drawn(steps),
            (Names{"plan zero3 prefetch=2 train.accum=1", "plan zero3 prefetch=0 train.accum=1"}));
  EXPECT_EQ(steps.at("steps").size(), 8u);
  // Equal work, which takes longer.
  const ordered_json &on = steps.at("steps")[6], &off = steps.at("steps")[4];
  EXPECT_GT(busy_ms(on, "gather"), 0);
  EXPECT_NEAR(busy_ms(on, "gather"), busy_ms(off, "gather"), 1e-4);
  EXPECT_NEAR(busy_ms(on, "compute"), busy_ms(off, "compute"), 1e-4);
  EXPECT_LT(on.at("duration_ms"), off.at("duration_ms"));
}

TEST_F(ShownSteps, WhereOneDepthWasTrainedTheOtherIsPlanned) {
  EXPECT_EQ(drawn(shown(request({"--strategies=ddp,zero3"}))),
            (Names{"plan zero3", "plan zero3 with prefetch=0"}));
  EXPECT_EQ(drawn(shown(request({"--strategies=zero3", "--parallel.prefetch=0"}))),
            (Names{"plan zero3 with prefetch=1", "plan zero3"}));
  EXPECT_EQ(drawn(shown(request({"--strategies=ddp,zero1"}))), Names{"plan ddp"});
}

TEST_F(ShownSteps, TracesAreShownInPlaceOfPlans) {
  const Request r = request({"--strategies=ddp,zero3", "--sweep=parallel.prefetch=1,0"});
  EXPECT_EQ(drawn(shown(r, {0, 2, 3})),
            (Names{"trace zero3 prefetch=1", "trace zero3 prefetch=0"}));
}

TEST_F(ShownSteps, ATraceNextToPlansIsShownAlone) {
  const Request r = request({"--strategies=ddp,zero3", "--sweep=parallel.prefetch=1,0"});
  const ordered_json steps = shown(r, {1});
  EXPECT_EQ(drawn(steps), Names{"trace ddp prefetch=0"});
  EXPECT_EQ(names(steps.at("steps")), (Names{"plan ddp prefetch=1", "trace ddp prefetch=0",
                                             "plan zero3 prefetch=1", "plan zero3 prefetch=0"}));
  EXPECT_EQ(steps.at("steps")[1].at("memory").at("total"), ordered_json::array({0, 3}));
  for (const char* terms : {"terms", "host_terms", "sent_terms"}) {
    EXPECT_EQ(steps.at("steps")[1].at(terms), planned_step(r.configurations[1]).at(terms));
  }
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(ShownSteps, WhatIsOffloadedHasItsArithmeticOnTheHost) {
  const ordered_json steps = shown(request({"--strategies=ddp", "--sweep=offload.optimizer=0,1"}));
  const auto states = [&](std::size_t i, const char* terms) {
    ordered_json found;
    for (const ordered_json& term : steps.at("steps")[i].at(terms)) {
      if (term.at("category") == "optimizer") found = term;
    }
    return found;
  };
  EXPECT_FALSE(states(0, "terms").is_null());
  EXPECT_TRUE(states(0, "host_terms").is_null());
  EXPECT_TRUE(states(1, "terms").is_null());
  EXPECT_EQ(states(1, "host_terms"), states(0, "terms"));
}

// The figures beside the chart of memory are those that it draws.
TEST_F(ShownSteps, TheArithmeticAddsUpToWhatIsDrawn) {
  const Request r = request({"--strategies=ddp,zero2,zero3", "--sweep=precision.param=f32,bf16"});
  const ordered_json steps = shown(r);
  ASSERT_EQ(steps.at("steps").size(), 7u);
  for (const ordered_json& step : steps.at("steps")) {
    std::map<std::string, std::int64_t> sums;
    for (const ordered_json& term : step.at("terms")) {
      sums[term.at("category")] += term.at("bytes").get<std::int64_t>();
    }
    for (const char* category : {"parameter_shard", "gradient", "optimizer", "activation"}) {
      const auto held = step.at("memory").at("bytes").at(category).get<std::vector<std::int64_t>>();
      EXPECT_EQ(sums[category], std::ranges::max(held)) << step.at("name") << category;
    }
  }
}

TEST_F(ShownSteps, WhatWasNotTrainedIsNotShown) {
  const Request r = request({"--strategies=ddp,zero3"});
  const ordered_json steps = shown(r, {}, {0, 1});
  EXPECT_TRUE(steps.at("streams").empty());
  EXPECT_TRUE(steps.at("steps").empty());
}

TEST_F(ShownSteps, ATraceThatCannotBeReadIsToldAndPlannedInstead) {
  const Request r = request({"--strategies=ddp"});
  shown(r, {0});
  folder_.write("run-0/trace.json", "{");
  const ordered_json steps = shown(r);
  ASSERT_FALSE(warnings_.empty());
  EXPECT_TRUE(has(warnings_.front(), {"run-0/trace.json"}));
  EXPECT_EQ(names(steps.at("steps")), Names{"plan ddp"});
  EXPECT_EQ(drawn(steps), Names{"plan ddp"});
}

TEST_F(ShownSteps, ABudgetIsMetAsTheTrainingMeetsIt) {
  const auto most = [&](const std::vector<std::string>& more) {
    Request r = request(more);
    check_plans(r);
    const ordered_json step = planned_step(r.configurations.at(0));
    return std::ranges::max(step.at("memory").at("total").get<std::vector<std::int64_t>>());
  };
  const std::int64_t free = most({"--strategies=zero3"});
  EXPECT_LT(most({"--strategies=zero3", "--memory_budget=" + std::to_string(free - 1)}), free);
}

// A search again, for rank 0 alone, would find what was asked for.
TEST_F(ShownSteps, WhatIsTrainedIsDrawnWhateverWasAskedFor) {
  Request r = request({"--strategies=zero3", "--parallel.prefetch=2", "--memory_budget=1GiB"});
  const ordered_json asked = planned_step(r.configurations.at(0));
  r.configurations.at(0).fitted.parallel.prefetch = 0;
  EXPECT_GT(planned_step(r.configurations.at(0)).at("duration_ms"), asked.at("duration_ms"));
  EXPECT_EQ(drawn(shown(r)), (Names{"plan zero3 with prefetch=1", "plan zero3"}));
}

// No option says how many a launcher starts.
TEST_F(ShownSteps, LaunchedProcessesAreDrawnAsTheyAreTrained) {
  Request r = request({"--strategies=zero3"});
  Configuration& c = r.configurations.at(0);
  c.launch = {.by = LauncherChoice::kTorchrun,
              .num_processes = 2,
              .num_local_processes = 2,
              .address = "tcp:127.0.0.1:29500"};
  ASSERT_TRUE(c.ranks().are_processes());
  const Request threads = request({"--strategies=zero3", "--parallel.ranks=2"});
  const ordered_json launched = planned_step(c), own = planned_step(threads.configurations.at(0));
  EXPECT_EQ(launched.at("terms").at(0).at("category"), "parameter_shard");
  EXPECT_EQ(launched.at("terms").at(0), own.at("terms").at(0)) << "of 2 ranks";
  const auto most_of_communication = [](const ordered_json& step) {
    const ordered_json& nbytes = step.at("memory").at("bytes").at("communication");
    return std::ranges::max(nbytes.get<std::vector<std::int64_t>>());
  };
  EXPECT_GT(most_of_communication(launched), most_of_communication(own)) << "reductions are staged";
}

TEST_F(ShownSteps, MemoryOfManyConfigurationsIsThinned) {
  const Request r = request({"--strategies=ddp,zero3", "--sweep=train.accum=1,4",
                             "--sweep=train.seed=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16"});
  ASSERT_EQ(r.configurations.size(), 64u);
  const ordered_json steps = shown(r);
  ASSERT_EQ(steps.at("steps").size(), 65u) << "64, and one without gathers ahead";
  int num_thinned = 0;
  for (const ordered_json& step : steps.at("steps")) {
    EXPECT_LE(step.at("memory").at("ms").size(), 4000u / 64 + 2);
    std::size_t num_slices = 0;
    for (const ordered_json& thread : step.at("threads")) num_slices += thread.at("slices").size();
    EXPECT_LE(num_slices, 8000u / 64);
    EXPECT_EQ(step.at("left_out").get<int>() > 0, num_slices == 8000u / 64);
    num_thinned += num_slices == 8000u / 64 ? 1 : 0;
  }
  EXPECT_EQ(num_thinned, 32) << "those of four micro-steps";
  EXPECT_LT(testing::json_text(steps).size(), 1'500'000u);
}

}  // namespace
}  // namespace tessera::tools

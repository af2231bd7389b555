// `plan --strategies` and `compare --plan`, as a person meets them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

class PlanStrategies : public testing::TinyTraining {
 protected:
  PlanStrategies() {
    data_ = flags_.at("data.path");
    flags_.erase("data.path");
    flags_["model.vocab"] = "256";
  }

  Outcome plan(const Flags& more) const {
    return testing::run_program("tools/programs/plan", with(more));
  }
  json json_of(Flags more) const {
    more["json"] = "true";
    const Outcome outcome = plan(more);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return testing::parse_json(outcome.out);
  }
  std::string refused(const Flags& more) const {
    const Outcome outcome = plan(more);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  }

  std::string data_;
};

TEST_F(PlanStrategies, EachRowIsThePlanOfThatStrategy) {
  const json table = json_of({{"strategies", "all"}, {"parallel.ranks", "4"}});
  EXPECT_EQ(table.at("configurations").size(), 8u);
  double most = 0;
  std::string fastest;
  for (const json& row : table.at("configurations")) {
    const std::string name = row.at("name");
    const json one = json_of({{"parallel.strategy", name}, {"parallel.ranks", "4"}});
    for (const char* figure : {"sent_bytes", "num_collectives", "step_ms", "exposed_comm_ms"}) {
      EXPECT_EQ(row.at(figure), one.at(figure)) << name << " " << figure;
    }
    EXPECT_EQ(row.at("host_peak_bytes"), one.at("host_peak_bytes").at("total"));
    EXPECT_GE(row.at("peak_bytes"), one.at("peak_bytes").at("total"));
    EXPECT_NEAR(row.at("tokens_per_s").get<double>(),
                4 * 8 / (one.at("step_ms").get<double>() * 1e-3), 1e-3);
    if (row.at("tokens_per_s").get<double>() > most) {
      most = row.at("tokens_per_s");
      fastest = name;
    }
  }
  EXPECT_EQ(table.at("fastest").at(0), fastest);
  const Outcome text = plan({{"strategies", "zero2,ddp"}, {"parallel.ranks", "4"}});
  EXPECT_TRUE(has(text.out, {"4 ranks on CPUs, at 100 GFLOP/s", "\nzero2  ", "\nddp    ",
                             "\nfastest", "\nleast memory: "}));
}

TEST_F(PlanStrategies, WhatIsEqualIsTold) {
  const auto equal_to = [&](const std::string& strategies, const char* ranks) {
    const json rows =
        json_of({{"strategies", strategies}, {"parallel.ranks", ranks}, {"model.layers", "4"}});
    std::string text;
    for (const json& row : rows.at("configurations")) {
      if (!row.contains("equal_to")) continue;
      text += fmt::format("{}={} ", row.at("name").get<std::string>(),
                          row.at("equal_to").get<std::string>());
    }
    return text;
  };
  EXPECT_EQ(equal_to("zero3,ddp,hsdp:4,fsdp,hybrid_zero2:4,zero2", "4"),
            "hsdp:4=zero3 fsdp=zero3 zero2=hybrid_zero2:4 ");
  EXPECT_EQ(equal_to("all", "1"), "zero1=ddp zero2=ddp hsdp=zero3 hybrid_zero2=ddp hfsdp=zero3 ");
  EXPECT_TRUE(has(plan({{"strategies", "zero3,hsdp:2"}}).out, {"%  = zero3\n"}));
  EXPECT_TRUE(has(plan({{"strategies", "hsdp"}, {"parallel.ranks", "7"}}).out,
                  {"warning: hsdp on 7 ranks has replicas of 1 rank"}));
}

TEST_F(PlanStrategies, ABudgetIsAppliedToEach) {
  const std::string ddp = std::to_string(
      json_of({{"strategies", "ddp"}}).at("configurations").at(0).at("peak_bytes").get<int>() - 1);
  const json table = json_of({{"strategies", "all"}, {"memory_budget", ddp}});
  int num_changed = 0;
  for (const json& row : table.at("configurations")) {
    const json one = json_of({{"parallel.strategy", row.at("name")}, {"memory_budget", ddp}});
    EXPECT_TRUE(row.at("fits"));
    EXPECT_EQ(row.at("options"), one.at("memory_budget").at("options"));
    EXPECT_EQ(row.at("peak_bytes"), one.at("memory_budget").at("rungs").back().at("peak_bytes"));
    EXPECT_EQ(row.at("step_ms"), one.at("step_ms"));
    num_changed += row.at("options").empty() ? 0 : 1;
  }
  EXPECT_GT(num_changed, 0);
  EXPECT_LT(num_changed, 8);
  const Outcome text = plan({{"strategies", "ddp,zero3"}, {"memory_budget", ddp}});
  EXPECT_TRUE(has(text.out, {"     fits\n", "  changed\n", "      yes\n", "\nddp fits with ",
                             "\nfastest that fits"}));

  const Outcome none = plan({{"strategies", "ddp,zero3"}, {"memory_budget", "20kB"}});
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_TRUE(has(none.out, {"  no\n", "\nnone of them fits\n"}));
  EXPECT_TRUE(has(none.err, {"[memory_budget] expected a strategy that fits 20kB, got none"}));
}

TEST_F(PlanStrategies, WhatAStrategyCannotDoStandsInItsRow) {
  const Outcome outcome = plan({{"strategies", "ddp,zero3,hsdp"}, {"parallel.bucket_mb", "1"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(
      has(outcome.out, {"\nzero3  cannot be trained so\n", "\nhsdp   cannot be trained so\n",
                        "\nzero3: [config] expected parallel.bucket_mb with ddp, zero1, zero2",
                        "\nfastest: ddp with"}));
  EXPECT_TRUE(has(refused({{"strategies", "zero3,hsdp"}, {"parallel.bucket_mb", "1"}}),
                  {"[config] expected parallel.bucket_mb with ddp, zero1, zero2"}));
  // What only some have a use for is theirs.
  EXPECT_EQ(
      plan({{"strategies", "ddp,hsdp"}, {"parallel.shard_ranks", "1"}, {"parallel.prefetch", "2"}})
          .exit_code,
      0);
  // What the default strategy could not do is refused where it is in the list.
  const Flags across = {
      {"parallel.ranks", "4"}, {"comm.hook", "powersgd"}, {"powersgd.across_replicas", "true"}};
  for (const std::string strategies : {"hsdp:2,hybrid_zero2:2", "zero3,hsdp:2"}) {
    Flags flags = across;
    flags["strategies"] = strategies;
    const Outcome planned = plan(flags);
    EXPECT_EQ(planned.exit_code, 0) << planned.err;
    EXPECT_TRUE(has(planned.out, {"\nhsdp:2 ", "\nfastest"})) << planned.out;
    EXPECT_EQ(has(planned.out, {"cannot be trained so"}), strategies.starts_with("zero3"));
  }
  EXPECT_TRUE(has(refused({{"strategies", "ddp,zero3"}, {"cuda.graph", "on"}}),
                  {"got cuda.graph=on where the device is the CPU"}));
  EXPECT_TRUE(has(refused({{"strategies", "all"}, {"parallel.strategy", "ddp"}}),
                  {"strategies or parallel.strategy, got both"}));
  EXPECT_TRUE(has(refused({{"strategies", "all"}, {"log.trace", folder_ / "trace.json"}}),
                  {"log.trace with the plan of one strategy"}));
  EXPECT_TRUE(has(refused({{"strategies", "ddp,zero4"}}), {"got 'zero4'"}));
  EXPECT_TRUE(has(refused({{"strategies", "ddp,hsdp:4294967296"}}), {"at most 1048576 ranks"}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "trace.json"));
}

// Ranks of a plan are no threads; those of a trainer are.
TEST_F(PlanStrategies, ThereMayBeThousandsOfRanks) {
  const json rows = json_of({{"strategies", "ddp,zero3,hsdp:8"}, {"parallel.ranks", "16384"}})
                        .at("configurations");
  EXPECT_EQ(rows.at(0).at("ranks"), 16384);
  EXPECT_NEAR(rows.at(0).at("tokens_per_s").get<double>() * rows.at(0).at("step_ms").get<double>(),
              1e3 * 16384 * 8, 1);
  EXPECT_EQ(plan({{"parallel.ranks", "4096"}}).exit_code, 0);
  EXPECT_TRUE(has(refused({{"parallel.ranks", "1048577"}}), {"an integer in [0, 1048576]"}));
  const Outcome trainer = run({{"parallel.ranks", "1025"}, {"data.path", data_}});
  EXPECT_EQ(trainer.exit_code, 1);
  EXPECT_TRUE(has(trainer.err, {"an integer in [0, 1024]"}));
}

TEST_F(PlanStrategies, CompareSaysAsMuchAndTrainsNothing) {
  const auto compare = [&](Flags more) {
    more["plan"] = "true";
    more["data.path"] = data_;
    Flags flags = with(more);
    for (const char* option : {"sample.tokens", "log.every", "train.steps"}) flags.erase(option);
    if (more.contains("sweep")) flags.erase("train.batch");
    return testing::run_program("tools/compare/compare", flags);
  };
  const Outcome same = compare({{"strategies", "all"}});
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(same.out, plan({{"strategies", "all"}}).out);
  const Outcome swept = compare({{"strategies", "ddp,zero3"}, {"sweep", "train.batch=1,2"}});
  EXPECT_TRUE(has(swept.out, {"\nddp train.batch=1    ", "\nzero3 train.batch=2  "}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  for (const auto& [option, value] : Flags{{"rounds", "2"}, {"report", "x.html"}}) {
    EXPECT_TRUE(
        has(compare({{option, value}}).err, {option + " without plan only", "nothing is trained"}));
  }
  EXPECT_TRUE(has(compare({{"log.trace", "yes"}}).err, {"log.trace with trainings"}));
}

}  // namespace
}  // namespace tessera

// A training that the host's memory cannot hold is refused before its ranks start.
#include "tools/programs/run/memory_check.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::Flags;
using testing::has;
using testing::Outcome;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

TrainPlan plan_of(std::int64_t device_nbytes, std::int64_t host_nbytes) {
  TrainPlan plan{};
  plan.steps.resize(1);
  plan.steps[0].memory.peak_total_nbytes = device_nbytes;
  plan.steps[0].step_host_memory.peak_total_nbytes = host_nbytes;
  return plan;
}

TEST(HostMemory, IsTheSumOverRanksOfWhichOneOfEachKindIsPlanned) {
  int num_plans = 0;
  const auto kind = [](int rank) { return std::string(rank == 3 ? "last" : ""); };
  const auto plan = [&](int rank) {
    ++num_plans;
    return rank == 3 ? plan_of(50, 700) : plan_of(100, 20);
  };
  const HostMemory on_cpus = host_memory({4}, /*on_gpus=*/false, kind, plan);
  EXPECT_EQ(on_cpus.nbytes, 3 * 120 + 750);
  EXPECT_EQ(on_cpus.most_nbytes, 750);
  EXPECT_EQ(num_plans, 2);
  const HostMemory on_gpus = host_memory({4}, /*on_gpus=*/true, kind, plan);
  EXPECT_EQ(on_gpus.nbytes, 3 * 20 + 700);
  // Ranks of other processes take theirs elsewhere.
  const HostMemory two =
      host_memory({.world_size = 4, .first = 2, .count = 2}, /*on_gpus=*/false, kind, plan);
  EXPECT_EQ(two.nbytes, 120 + 750);
}

TEST(HostMemory, CountsWhatIsTakenBetweenSteps) {
  TrainPlan plan = plan_of(100, 0);
  plan.between_steps_nbytes = 160;
  const HostMemory memory = host_memory(
      {2}, false, [](int) { return ""; }, [&](int) { return plan; });
  EXPECT_EQ(memory.nbytes, 320);
}

MachineLimits machine_of(std::int64_t available_nbytes) {
  return {.memory_nbytes = 4096 * kMiB, .available_nbytes = available_nbytes};
}

TEST(MemoryShortage, NamesBothFiguresAndWhoseTheLimitIs) {
  const HostMemory memory{.nbytes = 1000 * kMiB, .most_nbytes = 250 * kMiB};
  const Ranks ranks{.size = 4};
  MachineLimits limits = machine_of(1000 * kMiB - 1);
  EXPECT_EQ(memory_shortage(memory, {}, ranks, MachineLimits{}).text, "") << "nothing is known";
  EXPECT_EQ(memory_shortage(memory, {}, ranks, limits).text,
            "[memory] expected 1000.0 MiB of the host's memory for 4 ranks (up to 250.0 MiB each), "
            "got 1000.0 MiB that are free: this machine has 4.0 GiB; try --memory_budget=249MiB, "
            "for each rank (if nothing fits, it says what would)");
  EXPECT_TRUE(memory_shortage(memory, {}, ranks, limits).is_certain);
  limits.cgroup_limit_nbytes = 500 * kMiB;
  limits.cgroup_used_nbytes = 12 * kMiB;
  EXPECT_TRUE(has(
      memory_shortage(memory, {}, ranks, limits).text,
      {"1000.0 MiB", "got 488.0 MiB", "a cgroup", "allows 500.0 MiB", "--memory_budget=122MiB"}));
  limits.address_limit_nbytes = 400 * kMiB;
  limits.address_used_nbytes = 100 * kMiB;
  EXPECT_TRUE(has(memory_shortage(memory, {}, ranks, limits).text,
                  {"got 300.0 MiB", "ulimit -v allows 400.0 MiB", "--memory_budget=75MiB"}));
}

// Freed blocks are kept, so that a process holds up to half as much again.
TEST(MemoryShortage, IsNotCertainWhereOnlyKeptBlocksMayNotFit) {
  const HostMemory memory{.nbytes = 1000 * kMiB, .most_nbytes = 250 * kMiB};
  const Ranks ranks{.size = 4};
  const MemoryShortage none = memory_shortage(memory, {}, ranks, machine_of(1500 * kMiB));
  EXPECT_EQ(none.text, "");
  for (const std::int64_t room : {1500 * kMiB - 1, 1000 * kMiB}) {
    const MemoryShortage some = memory_shortage(memory, {}, ranks, machine_of(room));
    EXPECT_FALSE(some.is_certain);
    EXPECT_TRUE(has(some.text, {"expected 1000.0 MiB", "and at times 1.5 GiB with blocks kept"}));
  }
  EXPECT_TRUE(has(memory_shortage(memory, {}, ranks, machine_of(1200 * kMiB)).text,
                  {"--memory_budget=200MiB"}));
}

TEST(MemoryShortage, SaysWhatElseTakesLessWhereABudgetIsKept) {
  const HostMemory memory{.nbytes = 1000 * kMiB, .most_nbytes = 250 * kMiB};
  TrainConfig config;
  config.memory_budget = "100MiB";
  config.train.accum = 3;
  const auto advice = [&](const Ranks& ranks) {
    return memory_shortage(memory, config, ranks, machine_of(400 * kMiB)).text;
  };
  EXPECT_TRUE(has(advice({.size = 4}), {"try --parallel.ranks=2 --train.accum=6 (same bits)"}));
  EXPECT_TRUE(has(advice({.size = 4, .launch = {.num_processes = 4}}),
                  {"try 2 processes with --train.accum=6 (same bits)"}));
  EXPECT_TRUE(has(advice({.size = 1}), {"1 rank, got", "--train.batch"}));
  EXPECT_TRUE(has(advice({.size = 4, .num_gpus = 4}), {"offload less"}));
  config.memory_budget = "200MiB";
  EXPECT_TRUE(has(advice({.size = 4}), {"--memory_budget=100MiB"}));
}

TEST(MemoryShortage, IsAnErrorWhereRanksWouldStart) {
  TrainConfig config;
  const MemoryShortage certain{.text = "[memory] x", .is_certain = true};
  const MemoryShortage likely{.text = "[memory] x", .is_certain = false};
  EXPECT_EQ(check_shortage({}, config), "");
  EXPECT_EQ(error_of<engine::DeviceError>([&] { check_shortage(certain, config); }),
            "[memory] x, or --memory_check=false to go on");
  EXPECT_EQ(check_shortage(likely, config), "warning: [memory] x");
  config.plan = true;
  EXPECT_EQ(check_shortage(certain, config), "warning: [memory] x; a training is refused");
  EXPECT_EQ(check_shortage(likely, config), "warning: [memory] x");
  config.memory_check = false;
  EXPECT_EQ(check_shortage(certain, config), "warning: [memory] x");
  config.plan = false;
  EXPECT_EQ(check_shortage(certain, config), "warning: [memory] x");
}

const std::string kPlan = "tools/programs/plan", kCompare = "tools/compare/compare";

class MemoryCheck : public testing::TinyTraining {
 protected:
  // Of 4 ranks that take 180 MiB each, of `limit_kib` of addresses.
  Outcome limited(const std::string& program, std::int64_t limit_kib,
                  const Flags& more = {}) const {
    Flags flags = with({{"model.layers", "1"},
                        {"model.dim", "256"},
                        {"model.heads", "4"},
                        {"model.seq", "512"},
                        {"train.batch", "16"},
                        {"parallel.ranks", "4"}});
    if (program == kPlan) {
      flags.erase("data.path");
      flags["model.vocab"] = "256";
    }
    std::string line = "ulimit -v " + std::to_string(limit_kib) + "; exec " + program;
    for (const auto& [name, value] : more) flags[name] = value;
    for (const auto& [name, value] : flags) line += " --" + name + "=" + value;
    return shell(line);
  }
  bool has_run() const { return std::filesystem::exists(folder_ / "run"); }

  static constexpr std::int64_t kKib = 700'000;  // one rank would fit
};

TEST_F(MemoryCheck, RefusesBeforeAnythingIsMade) {
  const Outcome outcome = limited(testing::kTransformer, kKib);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err,
                  {"error: [memory] expected 718.7 MiB of the host's memory for 4 ranks (up to ",
                   "ulimit -v allows 683.6 MiB; try --memory_budget=", "MiB, for each rank",
                   ", or --memory_check=false to go on\n"}))
      << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_FALSE(has_run());
}

// A plan takes addresses as a rank does, though no memory.
TEST_F(MemoryCheck, RefusesWhatCannotEvenBePlanned) {
  const Outcome outcome = limited(testing::kTransformer, kKib, {{"train.batch", "64"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"error: [memory] expected more than ", "for each of 4 ranks",
                                "ulimit -v allows 683.6 MiB", "--memory_check=false to go on\n"}))
      << outcome.err;
  EXPECT_FALSE(has_run());
}

TEST_F(MemoryCheck, APlanWarnsInTheSameWords) {
  const Outcome trainer = limited(testing::kTransformer, kKib, {{"plan", "true"}});
  EXPECT_EQ(trainer.exit_code, 0) << trainer.err;
  const std::string needs = "warning: [memory] expected 718.7 MiB of the host's memory for 4 ranks";
  EXPECT_TRUE(has(trainer.out, {needs, "; a training is refused\n"}));
  const Outcome plan = limited(kPlan, kKib);
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out, {needs, "ulimit -v allows 683.6 MiB", "; a training is refused\n"}));
  const auto warnings = [&](const Flags& more) {
    Flags flags = more;
    flags["json"] = "true";
    const auto record = testing::parse_json(limited(kPlan, kKib, flags).out);
    return record.contains("warnings") ? record.at("warnings").size() : 0;
  };
  EXPECT_EQ(warnings({}), 1u);
  EXPECT_EQ(warnings({{"train.batch", "1"}}), 0u);
}

TEST_F(MemoryCheck, GoesOnWhereItIsToldTo) {
  const Outcome outcome = limited(testing::kTransformer, kKib, {{"memory_check", "false"}});
  EXPECT_TRUE(has(outcome.out, {"warning: [memory] expected 718.7 MiB ", "ulimit -v allows"}))
      << outcome.out;
  EXPECT_TRUE(has_run());
  EXPECT_EQ(outcome.out.find("is refused"), std::string::npos);
  EXPECT_EQ(outcome.err.find("--memory_check"), std::string::npos) << outcome.err;
}

TEST_F(MemoryCheck, AComparisonRefusesBeforeItsFirstTraining) {
  const Outcome outcome = limited(kCompare, kKib, {{"strategies", "zero3"}, {"train.steps", "9"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"[memory] expected 718.7 MiB of the host's memory for 4 ranks",
                                "--memory_check=false to go on"}))
      << outcome.err;
  EXPECT_FALSE(has_run());
}

TEST_F(MemoryCheck, HoldsForImagesAndWithAFileOfOptions) {
  const std::string file = folder_.write("run.toml", "memory_check = false\n");
  const std::string mlp =
      "ulimit -v 700000; exec " + testing::kMlp +
      " --device=cpu --model.hidden=2048 --model.layers=6 --parallel.strategy=ddp --train.steps=1"
      " --train.warmup=0"
      " --out=" +
      folder_ / "run";
  const Outcome refused = shell(mlp);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(has(refused.err, {"error: [memory] expected ", "for 2 ranks"})) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  const Outcome told = shell(mlp + " --plan --config=" + file);
  EXPECT_EQ(told.exit_code, 0) << told.err;
  EXPECT_TRUE(has(told.out, {"warning: [memory] expected "}));
  EXPECT_EQ(told.out.find("is refused"), std::string::npos);
}

TEST_F(MemoryCheck, WhatFitsIsTrained) {
  const Outcome outcome = shell("ulimit -v 2000000; exec " + command());
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out.find("[memory]"), std::string::npos);
}

}  // namespace
}  // namespace tessera::tools

// What a configuration leaves open is decided once: by the trainer, its --plan, and the program
// plan.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/config/rates_config.h"
#include "tools/launch/ranks.h"
#include "tools/planning/task_plan.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::Flags;
using testing::has;
using testing::Outcome;

const std::string kPlan = "tools/programs/plan";

class PlanChoices : public testing::TinyTraining {
 protected:
  // As the program plan and the trainer take them.
  Outcome planned(const Flags& more) const {
    Flags flags = with(more);
    flags.erase("data.path");
    flags["model.vocab"] = "256";
    return testing::run_program(kPlan, flags);
  }
};

TEST_F(PlanChoices, WhatATrainerRefusesHereAPlanRefusesToo) {
  flags_["device"] = "auto";
  for (const Flags& more :
       {Flags{{"parallel.backend", "nccl"}}, Flags{{"parallel.backend", "nccl"}, {"device", "cpu"}},
        Flags{{"cuda.graph", "on"}, {"device", "cpu"}},
        Flags{{"cuda.tune_gemm", "true"}, {"device", "cpu"}},
        Flags{{"parallel.strategy", "hsdp"}, {"parallel.shard_ranks", "3"}},
        Flags{{"parallel.strategy", "ddp"}, {"parallel.prefetch", "1"}}}) {
    Flags many = more;
    many["parallel.ranks"] = "50";  // more than there are GPUs
    const Outcome trainer = run(many), plan = planned(many);
    EXPECT_EQ(trainer.exit_code, 1) << trainer.out;
    EXPECT_EQ(plan.exit_code, 1) << plan.out;
    EXPECT_TRUE(has(plan.err, {"error: [config] expected "}));
    EXPECT_EQ(plan.err, trainer.err);
  }
}

TEST_F(PlanChoices, WhatATrainerWarnsOfAPlanWarnsOfToo) {
  for (const char* strategy : {"hsdp", "hybrid_zero2", "hfsdp"}) {
    const Flags odd{{"parallel.strategy", strategy}, {"parallel.ranks", "7"}};
    Flags only = odd;
    only["plan"] = "true";
    const Outcome trainer = run(only), plan = planned(odd);
    const std::string line =
        std::string("warning: ") + strategy + " on 7 ranks has replicas of 1 rank";
    EXPECT_TRUE(has(trainer.out, {line}));
    EXPECT_TRUE(has(plan.out, {line}));
    const auto upto_times = [](const std::string& text) {
      return text.substr(0, text.find("a step has "));
    };
    EXPECT_EQ(upto_times(plan.out), upto_times(trainer.out));
    Flags json = odd;
    json["json"] = "true";
    const auto record = testing::parse_json(planned(json).out);
    ASSERT_EQ(record.at("warnings").size(), 1u);
    EXPECT_EQ(record.at("warnings")[0].get<std::string>().find(line), 0u);
  }
  EXPECT_EQ(planned({{"parallel.strategy", "hsdp"}, {"parallel.ranks", "6"}}).out.find("warning"),
            std::string::npos);
}

TEST(PlanChoicesTest, RanksAreChosenByWhatTheMachineHas) {
  TrainConfig config;
  EXPECT_EQ(Ranks::on(config, 0).size, 4);
  EXPECT_EQ(Ranks::on(config, 0).num_gpus, 0);
  EXPECT_EQ(Ranks::on(config, 8).size, 8);
  EXPECT_TRUE(Ranks::on(config, 8).nccl);
  config.parallel.ranks = 3;
  EXPECT_EQ(Ranks::on(config, 2).num_gpus, 2);
  EXPECT_FALSE(Ranks::on(config, 2).nccl);
  config.parallel.backend = BackendChoice::kNccl;
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { Ranks::on(config, 2); }),
                  {"a GPU for each of 3 ranks, got 2 (parallel.backend=nccl)"}));
  config.device = DeviceChoice::kCpu;
  config.parallel.backend = BackendChoice::kAuto;
  EXPECT_EQ(Ranks::planned(config).num_gpus, 0);
}

TEST(PlanChoicesTest, APlanForGpusHasOneForEachRank) {
  TrainConfig config;
  config.device = DeviceChoice::kCuda;
  config.parallel.ranks = 64;
  const Ranks ranks = Ranks::planned(config);
  EXPECT_EQ(ranks.size, 64);
  EXPECT_EQ(ranks.num_gpus, 64);
  EXPECT_TRUE(ranks.nccl);
  const PlanTarget target = plan_target(ranks, config);
  EXPECT_TRUE(target.on_gpus && target.stages);
  EXPECT_FALSE(target.sums_in_rank_order);
  config.parallel.backend = BackendChoice::kThreads;
  EXPECT_FALSE(Ranks::planned(config).nccl);
  config.parallel.ranks = 0;
  EXPECT_GE(Ranks::planned(config).size, 1);
}

// NVIDIA's data sheet of the H100 SXM: 1,979 TFLOP/s in bf16 with sparsity, 67 in f32, 3.35 TB/s,
// NVLink 900 GB/s both ways.
TEST(PlanChoicesTest, RatesAreThoseOfTheDevice) {
  using engine::DType;
  const auto chosen = [](bool on_gpus, DType dtype, const std::vector<const char*>& given = {}) {
    RatesConfig rates;
    FlagSet flags("plan", "");
    rates.add_to(flags);
    std::ostringstream out;
    EXPECT_TRUE(flags.parse(given, out));
    return rates.rates(on_gpus, dtype);
  };
  const engine::MetaRates core;
  EXPECT_EQ(chosen(false, DType::kBF16).flops_per_s, core.flops_per_s);
  EXPECT_EQ(chosen(false, DType::kF32).bytes_per_s, 10e9);
  EXPECT_EQ(chosen(false, DType::kF32).link_bytes_per_s, 10e9);
  EXPECT_EQ(chosen(true, DType::kBF16).flops_per_s, 989.5e12);
  EXPECT_EQ(chosen(true, DType::kF32).flops_per_s, 67e12);
  EXPECT_EQ(chosen(true, DType::kF32).bytes_per_s, 3.35e12);
  EXPECT_EQ(chosen(true, DType::kF32).link_bytes_per_s, 450e9);
  EXPECT_DOUBLE_EQ(chosen(true, DType::kF32).link_latency_s, 20e-6);
  for (const bool on_gpus : {false, true}) {
    const engine::MetaRates r = chosen(on_gpus, DType::kBF16,
                                       {"--rates.gflops=5", "--rates.memory_gbs=6",
                                        "--rates.link_gbs=7", "--rates.link_latency_us=8"});
    EXPECT_EQ(r.flops_per_s, 5e9);
    EXPECT_EQ(r.bytes_per_s, 6e9);
    EXPECT_EQ(r.link_bytes_per_s, 7e9);
    EXPECT_DOUBLE_EQ(r.link_latency_s, 8e-6);
  }
  // A default of the CPU that is asked for is kept.
  EXPECT_EQ(chosen(true, DType::kF32, {"--rates.gflops=100"}).flops_per_s, 100e9);
  EXPECT_EQ(chosen(true, DType::kF32, {"--rates.gflops=0"}).flops_per_s, 67e12);
}

// As of a person, and of the run or comparison that wrote it, whatever device that had.
TEST(PlanChoicesTest, RatesOfAFileAreKeptOnAnyDevice) {
  using engine::DType;
  const testing::TempFolder folder;
  std::ostringstream out;
  const auto taken = [&](const std::string& toml, RatesConfig& rates) {
    folder.write("f.toml", toml);
    const std::string path = folder / "f.toml";
    FlagSet flags("plan", "");
    rates.add_to(flags);
    EXPECT_TRUE(flags.parse(std::vector<const char*>{"--config", path.c_str()}, out));
    return flags.to_toml();
  };
  RatesConfig asked, again;
  const std::string written = taken("[rates]\ngflops = 300000\nmemory_gbs = 10\n", asked);
  EXPECT_EQ(taken(written, again), written);
  for (const RatesConfig& rates : {asked, again}) {
    EXPECT_EQ(rates.rates(true, DType::kBF16).flops_per_s, 3e14);
    EXPECT_EQ(rates.rates(true, DType::kBF16).bytes_per_s, 10e9);
    EXPECT_EQ(rates.rates(true, DType::kBF16).link_bytes_per_s, 450e9);
    EXPECT_EQ(rates.rates(false, DType::kBF16).flops_per_s, 3e14);
    EXPECT_EQ(rates.rates(false, DType::kBF16).link_bytes_per_s, 10e9);
  }
}

}  // namespace
}  // namespace tessera::tools

// From a command line and logs to a verdict: what must be equal, what may differ, and who is named.
#include "tools/compare/comparison/comparison.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shard/placement.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/comparison/made_runs.h"
#include "tests/tools/compare/comparison/strategy_formulas.h"
#include "tests/tools/compare/page/sample_comparison.h"
#include "tests/tools/compare/request/compare_request.h"
#include "tools/compare/page/report_page.h"
#include "tools/models/language_model.h"
#include "tools/planning/planner.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;
using testing::memory_formulas;
using testing::run_of;
using testing::sent_formula;
using testing::TempFolder;

class CompareRequest : public ::testing::Test {
 protected:
  Request request(const std::vector<std::string>& more) const {
    return testing::compare_request(folder_, 2, more);
  }
  std::string refused(const std::vector<std::string>& more) const {
    return error_of<engine::Error>([&] { request(more); });
  }

  const TempFolder folder_;
};

// Requests ---------------------------------------------------------------------------------------

TEST_F(CompareRequest, HoldsAConfigurationForEachCombination) {
  const Request r = request({"--strategies=ddp,zero3", "--sweep", "parallel.prefetch=0,2",
                             "--sweep=offload.optimizer=0,1", "--train.steps=7"});
  ASSERT_EQ(r.configurations.size(), 8u);
  const Configuration& last = r.configurations.back();
  EXPECT_EQ(last.name, "zero3 prefetch=2 offload.optimizer=1");
  EXPECT_EQ(last.config.parallel.prefetch, 2);
  EXPECT_EQ(last.config.offload.optimizer, 1);
  EXPECT_EQ(last.config.train.steps, 7);
  EXPECT_EQ(last.options.at("parallel.strategy"), "\"zero3\"");
  EXPECT_EQ(last.num_ranks, 4);
  EXPECT_TRUE(has(last.toml, {"strategy = \"zero3\""}));
  EXPECT_TRUE(has(last.toml, {"out = \"runs/train_transformer\""}));
  EXPECT_EQ(request({"--parallel.strategy=zero2"}).configurations.size(), 1u);
  EXPECT_EQ(request({"--sweep=parallel.strategy=ddp,hsdp"}).configurations.size(), 2u);
  EXPECT_EQ(request({}).configurations.size(), 4u);
  EXPECT_TRUE(request({"--help"}).configurations.empty());
}

TEST_F(CompareRequest, AHybridMaySayTheRanksThatShareACopy) {
  const Request r = request({"--strategies=ddp,hsdp:2,hsdp:4,hybrid_zero2:2,hsdp",
                             "--parallel.ranks=8", "--sweep=parallel.prefetch=1"});
  std::vector<std::string> names;
  std::vector<int> shard_ranks;
  for (const Configuration& c : r.configurations) {
    names.push_back(c.name);
    shard_ranks.push_back(c.shard_ranks);
    EXPECT_EQ(c.num_ranks, 8);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"ddp prefetch=1", "hsdp:2 prefetch=1", "hsdp:4 prefetch=1",
                                      "hybrid_zero2:2 prefetch=1", "hsdp prefetch=1"}));
  EXPECT_EQ(shard_ranks, (std::vector<int>{1, 2, 4, 2, 4}));
  const Configuration& hsdp = r.configurations[1];
  EXPECT_EQ(hsdp.options.at("parallel.strategy"), "\"hsdp\"");
  EXPECT_EQ(hsdp.options.at("parallel.shard_ranks"), "2");
  EXPECT_EQ(hsdp.overrides, (Overrides{{"parallel.strategy", "hsdp"},
                                       {"parallel.shard_ranks", "2"},
                                       {"parallel.prefetch", "1"}}));
  EXPECT_TRUE(has(hsdp.toml, {"strategy = \"hsdp\"", "shard_ranks = 2"}));
  EXPECT_EQ(request({"--sweep=parallel.strategy=hfsdp:2"}).configurations.at(0).shard_ranks, 2);
  const Request pair = request({"--find-divergence", "ddp", "hsdp:1"});
  EXPECT_EQ(pair.configurations.at(1).shard_ranks, 1);
  EXPECT_EQ(arithmetic_differences(r.configurations[0], hsdp), std::vector<std::string>());

  for (const char* bad :
       {"ddp:2", "zero3:2", "hsdp:", "hsdp:0", "hsdp:-2", "hsdp:x", "hsdp:2:2", "hsdp: 2"}) {
    EXPECT_TRUE(has(refused({std::string("--strategies=ddp,") + bad}),
                    {"[compare] expected the ranks that share one copy after hsdp", "as hsdp:2",
                     std::string("configuration ") + bad}))
        << bad;
  }
  EXPECT_TRUE(has(refused({"--strategies=ddp,hsdq:2"}),
                  {"expected one of zero3", "hsdp, ", "got 'hsdq' (configuration hsdq:2)"}));
  EXPECT_TRUE(has(refused({"--strategies=hsdp:3"}),
                  {"shard_ranks that divides 4 ranks, got 3 (configuration hsdp:3)"}));
  EXPECT_TRUE(has(refused({"--strategies=hsdp:99999999999999999999"}), {"parallel.shard_ranks"}));
  for (const char* twice : {"--parallel.shard_ranks=2", "--sweep=parallel.shard_ranks=2,4"}) {
    EXPECT_TRUE(has(refused({"--strategies=hsdp:2", twice}), {"parallel.shard_ranks", "once"}));
  }
}

TEST_F(CompareRequest, WhatCannotRunIsRefusedByTheNameOfItsConfiguration) {
  EXPECT_TRUE(has(refused({"--sweep=parallel.prefech=0,1"}), {"did you mean parallel.prefetch?"}));
  EXPECT_TRUE(has(refused({"--sweep=rounds=1,2"}), {"expected a known option, got rounds"}));
  EXPECT_TRUE(has(refused({"--sweep=parallel.prefetch=0,x"}), {"configuration ddp prefetch=x"}));
  EXPECT_TRUE(has(refused({"--strategies=ddp,zero4"}), {"configuration zero4"}));
  EXPECT_TRUE(has(
      refused({"--strategies=ddp,hsdp", "--sweep=parallel.ranks=2,3", "--parallel.shard_ranks=2"}),
      {"configuration ddp ranks=2"}));
  EXPECT_TRUE(has(refused({"--strategies=hsdp", "--sweep=parallel.shard_ranks=1,2,3"}),
                  {"(configuration hsdp shard_ranks=3)"}));
  EXPECT_TRUE(
      has(refused({"--strategies=zero3,ddp", "--offload.parameters=1"}), {"configuration ddp"}));
  EXPECT_TRUE(has(refused({"--sweep=cpu.gemm=eigen,none"}), {"configuration ddp cpu.gemm=none"}));
  EXPECT_TRUE(has(refused({"--sweep=memory_budget=1GiB,lots"}),
                  {"configuration ddp memory_budget=lots", "40GiB"}));
  EXPECT_TRUE(has(refused({"--sweep=model.vocab=256,10"}), {"configuration ddp model.vocab=10"}));
  EXPECT_TRUE(has(refused({"--sweep=data.path=/nowhere"}), {"once"}));
  EXPECT_TRUE(has(refused({"--sweep=parallel.prefetch=0,1", "--parallel.prefetch=1"}), {"once"}));
  EXPECT_TRUE(has(refused({"--strategies=ddp", "--parallel.strategy=ddp"}), {"got both"}));
  EXPECT_TRUE(has(refused({"--train.steps=3"}), {"warmup_steps below train.steps=3"}));
  EXPECT_TRUE(has(refused({"--save.final=x"}), {"save.final"}));
  EXPECT_TRUE(has(refused({"--log.val_prompts=x"}), {"expected no log.val_prompts"}));
  EXPECT_TRUE(has(refused({"--cuda.tune_gemm=false"}),
                  {"cuda.tune_gemm on GPUs only", "(configuration ddp)"}));
  EXPECT_TRUE(has(refused({"--cuda.graph=on"}), {"got cuda.graph=on where the device is the CPU"}));
  EXPECT_TRUE(has(refused({"--strategies=zero3,ddp", "--sweep=cuda.graph=auto,on"}),
                  {"(configuration zero3 cuda.graph=on)"}));
  EXPECT_TRUE(has(refused({"--log.jsonl=x"}), {"log.jsonl"}));
  EXPECT_TRUE(has(refused({"--tolerance=-1"}), {"tolerance"}));
  EXPECT_TRUE(has(refused({"--rounds=0"}), {"rounds"}));
}

// Ranks of a plan need no cores of this machine, and only some strategies have a use for a depth.
TEST_F(CompareRequest, WhatOnlyTrainingsOrSomeStrategiesNeedIsNotAskedOfOthers) {
  const std::vector<std::string> pinned = {"--strategies=ddp", "--cpu.pin=true",
                                           "--parallel.ranks=1024"};
  EXPECT_TRUE(has(refused(pinned), {"cpu.pin"}));
  std::vector<std::string> planned = pinned;
  planned.emplace_back("--plan");
  EXPECT_EQ(request(planned).configurations.size(), 1u);
  EXPECT_EQ(request({"--strategies=ddp,zero3", "--parallel.prefetch=2"}).configurations.size(), 2u);
}

// The verdict ------------------------------------------------------------------------------------

class CompareVerdict : public CompareRequest {
 protected:
  Comparison summary(std::vector<Trained> trained) const {
    return summarise(request_, std::move(trained));
  }
  const Request request_ = request({"--strategies=ddp,zero2,zero3", "--warmup_steps=1"});
};

std::string page_of(const Comparison& comparison) {
  nlohmann::ordered_json json = to_json(comparison);
  json["made_by"] = testing::sample_comparison().at("made_by");
  return report_page(json, testing::no_steps());
}

TEST_F(CompareVerdict, ALossThatIsNotFiniteDiffersFromANumberAlone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const RunRecord lost = run_of({3, nan, nan});
  const Comparison all = summary({{{lost}}, {{lost}}, {{run_of({3, nan, 1})}}});
  EXPECT_EQ(all.verdict.lines.at(0),
            "Parity fails: zero3 differs from ddp in what is not finite, first in step 3.");
  const std::string table = table_text(all);
  EXPECT_TRUE(has(table, {"baseline", "equal bits", "DIFFERS, not finite"})) << table;
  EXPECT_FALSE(has(table, {"inf"})) << table;
  const nlohmann::ordered_json json = to_json(all);
  const auto& rows = json.at("configurations");
  EXPECT_EQ(rows[0]["loss"], (nlohmann::ordered_json{3.0, nullptr, nullptr}));
  EXPECT_EQ(rows[1]["loss_difference"], (nlohmann::ordered_json{0.0, 0.0, 0.0}));
  EXPECT_EQ(rows[2]["loss_difference"], (nlohmann::ordered_json{0.0, 0.0, nullptr}));
  EXPECT_EQ(rows[1]["parity"]["max_loss_difference"], 0.0);
  EXPECT_TRUE(rows[2]["parity"]["max_loss_difference"].is_null());
  EXPECT_TRUE(has(page_of(all), {">not finite</td>"}));
}

TEST_F(CompareRequest, TheHeadOfThePageIsOfAllConfigurations) {
  const auto head = [&](const std::vector<std::string>& words,
                        const std::vector<std::string>& others = {}) {
    Request r = request(words);
    if (!others.empty()) r.configurations.push_back(request(others).configurations.front());
    return page_of(summarise(r, std::vector<Trained>(r.configurations.size())));
  };
  EXPECT_TRUE(has(head({"--sweep=parallel.ranks=2,1,4"}), {"<li>1 to 4 ranks</li>"}));
  EXPECT_TRUE(has(head({"--parallel.ranks=1"}), {"<li>1 rank</li>"}));
  EXPECT_TRUE(has(head({"--sweep=train.steps=9,7", "--warmup_steps=1"}),
                  {"<li>7 to 9 steps, 1 of them warm-up</li>"}));
  EXPECT_TRUE(has(head({}), {"<li>0.00 M parameters, 2 layers × 8</li>"}));
  EXPECT_TRUE(has(head({"--model.dim=512"}, {"--model.dim=16"}),
                  {"<li>0.01 to 6.44 M parameters, 2 layers × 16 to 512</li>"}));
  EXPECT_TRUE(has(head({}, {"--model.layers=4"}), {" M parameters, 2 to 4 layers × 8</li>"}));
}

TEST_F(CompareVerdict, MediansLeaveOutWarmUpAndWhatIsNotKnownIsNull) {
  const nlohmann::ordered_json json = to_json(summary({{{run_of({3, 2, 1})}}, {}, {}}));
  const auto& rows = json.at("configurations");
  EXPECT_EQ(rows[0]["metrics"]["step_ms"],
            (nlohmann::ordered_json{{"median", 11.5}, {"q1", 11.25}, {"q3", 11.75}}));
  EXPECT_TRUE(rows[0]["metrics"]["sent_bytes"].is_null());
  EXPECT_TRUE(rows[0]["metrics"]["overlap"].is_null());
  EXPECT_TRUE(rows[0]["planned"].is_null() && rows[0]["host_peak_bytes"].is_null());
  EXPECT_EQ(rows[0]["peak_bytes"]["total"], 1 << 20);
  EXPECT_EQ(rows[0]["loss"], (nlohmann::ordered_json{3.0, 2.0, 1.0}));
  EXPECT_EQ(rows[0]["loss_difference"], (nlohmann::ordered_json{0.0, 0.0, 0.0}));
  EXPECT_EQ(rows[0]["options"]["parallel.strategy"], "ddp");
  EXPECT_EQ(rows[0]["state"], "done");
  EXPECT_EQ(rows[1]["state"], "missing");
  EXPECT_TRUE(rows[1]["loss"].is_null() && rows[1]["last_loss"].is_null());
  EXPECT_TRUE(has(table_text(summary({{{run_of({3, 2, 1})}}, {}, {}})),
                  {"not measured: exposed ms, peak MiB planned, sent MiB"}));
}

// Rounds may differ in memory, as of what waits for the host: nothing is told as less than it was.
TEST_F(CompareVerdict, OfSeveralRoundsTheMostMemoryCountsAndOneMachineIsToldOnce) {
  RunRecord first = run_of({3, 2, 1}), second = first;
  first.peak_bytes = {{"optimizer", 5}, {"workspace", 9}, {"total", 14 << 20}};
  second.peak_bytes = {{"optimizer", 6}, {"workspace", 3}, {"total", 9}};
  first.metrics["overlap"] = second.metrics["overlap"] = {0.25, 0.25, 0.25};
  second.host_peak_bytes = {{"total", 2}};
  first.device = second.device = "cpu";
  first.cpu = second.cpu = "v3, Eigen 3.4.0";
  for (const auto& rounds : {std::vector{first, second}, {second, first}}) {
    const nlohmann::ordered_json json = to_json(summary({{rounds}, {}, {}}));
    const auto& row = json.at("configurations")[0];
    EXPECT_EQ(row["peak_bytes"],
              (nlohmann::ordered_json{{"optimizer", 6}, {"total", 14 << 20}, {"workspace", 9}}));
    EXPECT_EQ(row["host_peak_bytes"], (nlohmann::ordered_json{{"total", 2}}));
    EXPECT_TRUE(has(table_text(summary({{rounds}, {}, {}})), {" 14.00  ", "  25\n"}));
    EXPECT_EQ(json.at("devices"), nlohmann::ordered_json::array({"cpu, v3, Eigen 3.4.0"}));
  }
}

// Each part is long in a step of its own, so all are short in the median.
TEST_F(CompareVerdict, PartsOfAStepAddUpToIt) {
  RunRecord run = run_of({4, 3, 2, 1});
  run.metrics["step_ms"] = {900, 10, 10, 10};
  run.metrics["compute_ms"] = {1, 8, 1, 1};
  run.metrics["exposed_comm_ms"] = {890, 1, 8, 1};
  run.metrics["optimizer_ms"] = {0.5, 0.5, 0.5, 7.5};
  run.metrics["data_ms"] = {0.25, 0.25, 0.25, 0.25};
  RunRecord graph = run, unknown = run;
  graph.metrics.erase("compute_ms");
  graph.metrics.erase("optimizer_ms");
  unknown.metrics.erase("step_ms");
  const nlohmann::ordered_json json = to_json(summary({{{run}}, {{graph, graph}}, {{unknown}}}));
  const nlohmann::ordered_json& parts = json.at("configurations")[0].at("step_parts_ms");
  double sum = 0;
  for (const auto& [name, expected] : {std::pair("compute_ms", 10.0 / 3),
                                       {"exposed_comm_ms", 10.0 / 3},
                                       {"optimizer_ms", 8.5 / 3},
                                       {"data_ms", 0.25},
                                       {"other_ms", 0.25}}) {
    EXPECT_NEAR(parts.at(name).get<double>(), expected, 1e-12) << name;
    sum += parts.at(name).get<double>();
  }
  EXPECT_EQ(parts.size(), 5u);
  EXPECT_NEAR(sum, 10, 1e-12);
  // What is not known is in the rest.
  const nlohmann::ordered_json& waits = json.at("configurations")[1].at("step_parts_ms");
  EXPECT_TRUE(waits.at("compute_ms").is_null() && waits.at("optimizer_ms").is_null());
  EXPECT_NEAR(waits.at("exposed_comm_ms").get<double>(), 10.0 / 3, 1e-12);
  EXPECT_NEAR(waits.at("other_ms").get<double>(), 10 - 10.0 / 3 - 0.25, 1e-12);
  EXPECT_TRUE(json.at("configurations")[2].at("step_parts_ms").is_null());
}

// Formulas ---------------------------------------------------------------------------------------

// Two layers of width 8 on 4 ranks, 256 tokens, 8 positions: 2128 + 2 x 872 parameters.
TEST_F(CompareRequest, FormulasAreThoseOfTheStrategies) {
  const std::int64_t root = 8 * (256 + 8 + 2), block = 872, all = root + 2 * block;
  const Request r = request({"--strategies=ddp,zero1,zero2,zero3,shard_grad_op,hsdp,hfsdp"});
  ASSERT_EQ(r.configurations[0].model.num_parameters(), all);
  const auto sent = [&](int i) {
    return sent_formula(r.configurations.at(std::size_t(i))).value();
  };
  const double ring = 0.75 * 4, p = double(all);
  EXPECT_DOUBLE_EQ(sent(0), 2 * ring * p);
  EXPECT_DOUBLE_EQ(sent(1), 3 * ring * p);
  EXPECT_DOUBLE_EQ(sent(2), 2 * ring * p);
  EXPECT_DOUBLE_EQ(sent(3), ring * (double(root + 3 * block) + p));
  EXPECT_DOUBLE_EQ(sent(4), 2 * ring * p);
  // Replicas of 2: each of both hands its sum of half the model on.
  EXPECT_DOUBLE_EQ(sent(5), 2 * (double(root + 3 * block) + p) + 2 * 2 * p / 2);
  EXPECT_DOUBLE_EQ(sent(6), 2 * (double(root + 3 * block) + p) + 2 * 2 * p / 2 + 2 * p / 2);
  // bf16 comes back as f32, but over NCCL in its own order as bf16.
  Configuration half = r.configurations[0];
  half.config.precision.reduce = engine::DType::kBF16;
  EXPECT_DOUBLE_EQ(sent_formula(half).value(), 0.75 * (2 + 4) * p);
  half.sums_in_rank_order = false;
  EXPECT_DOUBLE_EQ(sent_formula(half).value(), 0.75 * (2 + 2) * p);
  const std::map<engine::Category, double> zero3 = memory_formulas(r.configurations.at(3));
  EXPECT_EQ(zero3, (std::map<engine::Category, double>{
                       {engine::Category::kParameterShard, double(all)},
                       {engine::Category::kGatheredParameter, 4.0 * double(root + 2 * block)},
                       {engine::Category::kGradient, double(all) + 4.0 * double(root + 2 * block)},
                       {engine::Category::kOptimizer, 2.0 * double(all)}}));
  for (const char* option : {"--comm.hook=bf16", "--memory_budget=1GiB",
                             "--parallel.unit_min_numel=9", "--parallel.reshard_after_forward=2"}) {
    const std::string strategy = option == std::string("--comm.hook=bf16") ? "ddp" : "zero3";
    const Request without = request({"--strategies=" + strategy, option});
    EXPECT_FALSE(sent_formula(without.configurations[0]).has_value()) << option;
  }
  EXPECT_TRUE(
      memory_formulas(request({"--strategies=ddp", "--memory_budget=1GiB"}).configurations[0])
          .empty());
  EXPECT_EQ(sent_formula(request({"--strategies=ddp", "--parallel.ranks=1"}).configurations[0]), 0);
}

// Every parameter is a multiple of 128 elements for each of 4 ranks, so nothing is padded.
void expect_formulas_are_planned(const Configuration& c, std::size_t num_memory_formulas) {
  ASSERT_EQ(c.num_ranks, 4);
  const std::unique_ptr<LanguageModel> model = c.model.make();
  const engine::Shape shape{c.config.train.batch, c.model.seq};
  const TrainPlan plan =
      make_plan(c.config, {.num_ranks = c.num_ranks}, *model,
                {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}});
  std::int64_t sent = 0;
  for (const PlannedCollective& collective : plan.collectives) {
    // Which formulas leave out: norms and losses.
    if (collective.label != "norm" && collective.label != "values") sent += collective.bytes_sent;
  }
  EXPECT_EQ(sent_formula(c), double(sent)) << c.name;
  const std::map<engine::Category, double> memory = memory_formulas(c);
  EXPECT_EQ(memory.size(), num_memory_formulas) << c.name;
  for (const auto& [category, nbytes] : memory) {
    const auto planned = std::ranges::find(plan.memory, category, &PlannedMemory::category);
    ASSERT_NE(planned, plan.memory.end()) << name_of(category);
    EXPECT_EQ(nbytes, double(planned->nbytes)) << c.name << " " << name_of(category);
  }
}

TEST_F(CompareRequest, FormulasAreWhatIsPlanned) {
  const struct {
    const char* sweep;
    std::size_t num_configurations;
    bool has_gradients, has_states;  // and formulas for them
  } cases[] = {
      {"precision.param=f32,bf16 train.accum=1,2 parallel.prefetch=0,1", 8, true, true},
      {"precision.reduce=f32,bf16 precision.accumulate=f32,bf16", 4, true, true},
      {"train.accum=2 train.accum_comm=last precision.reduce=f32,bf16", 2, false, true},
      {"train.optimizer=sgd train.momentum=0", 1, true, false},
      {"train.optimizer=sgd train.momentum=0.5", 1, true, true},
  };
  for (const auto& [sweep, num_configurations, has_gradients, has_states] : cases) {
    const Request r =
        request({"--strategies=ddp,zero1,zero2,zero3,shard_grad_op,hsdp,hybrid_zero2,hfsdp",
                 "--model.dim=512", "--model.seq=64", "--train.recompute",
                 std::string("--sweep=") + sweep, "--parallel.reductions_in_flight=0"});
    ASSERT_EQ(r.configurations.size(), 8 * num_configurations);
    for (const Configuration& c : r.configurations) {
      const bool gathers =
          shard::Placement::preset(c.config.parallel.strategy).parameters != shard::Place::kWhole;
      expect_formulas_are_planned(
          c, std::size_t{1} + gathers + std::size_t{has_gradients} + std::size_t{has_states});
    }
  }
}

}  // namespace
}  // namespace tessera::tools

// Faults that are planted in a training, one bit each, and found again; and trainings that must not
// differ.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/tools/probe/probed_gpt.h"
#include "tools/probe/divergence_report.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::Fault;
using testing::has;
using testing::ProbedRun;
using testing::run_probed;
using testing::TempFolder;
using enum ProbePhase;

constexpr GptConfig kModel = {.layers = 2, .heads = 3, .dim = 15, .seq = 9, .vocab = 67};

const TokenDataset& tokens() {
  static const TokenDataset data = [] {
    std::string bytes;
    for (int i = 0; i < 1000; ++i) {
      bytes += static_cast<char>(i * i % 67);
      bytes += '\0';
    }
    const TempFolder folder;
    return TokenDataset(TokenFile(folder.write("tokens.bin", bytes)),
                        {.seq = kModel.seq, .vocab = kModel.vocab, .seed = 3});
  }();
  return data;
}

TrainConfig config_of(const char* strategy, std::int64_t ranks, std::int64_t accum = 1) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.strategy = strategy;
  config.parallel.ranks = ranks;
  config.train.accum = accum;
  config.train.steps = 3;
  config.train.batch = 1;
  config.train.lr = 1e-2;
  config.out = "unused";
  return config;
}

ProbedRun run(const TrainConfig& config, const Fault& fault = {}) {
  return run_probed(config, kModel, tokens(), fault);
}

std::string reasons_of(const DivergenceReport& report) {
  std::string text;
  for (const auto& [reason, count] : report.not_compared) {
    text += fmt::format("{} {}\n", count, reason);
  }
  return text;
}

std::string text_of(const DivergenceReport& report) {
  return report.first ? fmt::format("{} in step {}, {} differ", target_text(report.first->key),
                                    report.first->key.step, report.num_differing)
                      : "nothing";
}

// Planted faults
// -----------------------------------------------------------------------------------

struct Planted {
  const char* name;
  ProbeKey key;
  std::int64_t index;
  const char* unit;
};
std::ostream& operator<<(std::ostream& out, const Planted& p) { return out << p.name; }

class PlantedFault : public ::testing::TestWithParam<Planted> {};

TEST_P(PlantedFault, IsNamedExactly) {
  const Planted& planted = GetParam();
  const TrainConfig config_a = config_of("ddp", 1, 4), config_b = config_of("zero3", 2, 2);
  const Fault fault{planted.key, planted.index};
  const ProbedRun a = run(config_a), b = run(config_b, fault);
  DivergenceResult result{.a = {"one", "a.jsonl", a.record.header},
                          .b = {"two", "b.jsonl", b.record.header},
                          .report = compare_probes(a.record, b.record)};
  ASSERT_TRUE(result.report.first);
  const Divergence& first = *result.report.first;
  EXPECT_EQ(target_text(first.key), target_text(planted.key));
  EXPECT_EQ(first.key.step, planted.key.step);
  EXPECT_EQ(first.a.unit, planted.unit);
  EXPECT_EQ(first.b.unit, planted.unit);
  EXPECT_GT(result.report.num_before, 100);
  EXPECT_EQ(first.a.rank, -1) << "no rank contradicts another";

  // By how much: the same again, for the values.
  const ProbedRun values_a = run_probed(config_a, kModel, tokens(), {}, first.key);
  const ProbedRun values_b = run_probed(config_b, kModel, tokens(), fault, first.key);
  EXPECT_EQ(std::ssize(values_a.gpt.loss), first.key.step) << "no step after it";
  const std::vector<float> in_a = values_of(values_a.record, first.key);
  const std::vector<float> in_b = values_of(values_b.record, first.key);
  EXPECT_EQ(checksum_of(in_a, 0).hash, first.a.checksum.hash);
  EXPECT_EQ(checksum_of(in_b, 0).hash, first.b.checksum.hash);
  result.values = difference_of(in_a, in_b);
  EXPECT_EQ(result.values->num_differing, 1);
  EXPECT_EQ(result.values->first_index, planted.index);
  EXPECT_EQ(result.values->max_ulps, 1);
  EXPECT_EQ(result.values->max_abs, std::abs(double{result.values->a} - double{result.values->b}));

  std::string text;
  for (const std::string& line : lines_of(result)) text += line + "\n";
  EXPECT_TRUE(has(text, {fmt::format("First difference: step {}", planted.key.step),
                         std::string(title_of(planted.key.phase)),
                         fmt::format("unit {}, tensor {}", planted.unit, planted.key.tensor),
                         fmt::format("1 of {} elements differs, the first at {}",
                                     engine::with_commas(std::ssize(in_a)), planted.index),
                         "at most 1 ULP\n"}));
  const auto json = to_json(result).at("first");
  EXPECT_EQ(json.at("phase"), name_of(planted.key.phase));
  EXPECT_EQ(json.at("tensor"), planted.key.tensor);
  EXPECT_EQ(json.at("values").at("num_differing"), 1);
}

// Of four micro-batches the third is that of rank 0 in the second micro-step of two ranks.
INSTANTIATE_TEST_SUITE_P(
    Phases, PlantedFault,
    ::testing::Values(
        Planted{"GatheredParameter", {2, 3, kGatheredForward, "h.1.mlp.c_fc.weight"}, 37, "h.1"},
        Planted{"Activation", {2, 3, kOutput, "h.0.output"}, 11, "h.0"},
        Planted{"ActivationGradient", {2, 4, kOutputGradient, "h.1.output"}, 7, "h.1"},
        Planted{"GatheredForBackward", {2, 2, kGatheredBackward, "h.1.ln_2.weight"}, 5, "h.1"},
        Planted{"GradientBeforeReduction", {2, 3, kGradient, "wte.weight"}, 512, "root"},
        Planted{"GradientAfterReduction", {2, 0, kReduced, "h.1.attn.c_attn.weight"}, 300, "h.1"},
        Planted{"Update", {2, 0, kUpdated, "h.1.mlp.c_proj.weight"}, 899, "h.1"},
        Planted{"OptimizerState", {2, 0, kState, "v of h.0.ln_1.bias"}, 14, "h.0"}),
    [](const auto& info) { return info.param.name; });

TEST(Divergence, RanksThatContradictEachOtherAreNamed) {
  const TrainConfig config = config_of("ddp", 3);
  const ProbeKey key{2, 0, kUpdated, "h.0.ln_1.weight"};
  const ProbedRun a = run(config), b = run(config, {key, 3, 2});
  const DivergenceReport report = compare_probes(a.record, b.record);
  ASSERT_TRUE(report.first);
  EXPECT_EQ(target_text(report.first->key), target_text(key));
  EXPECT_EQ(report.first->a.other_rank, -1);
  EXPECT_EQ(report.first->b.rank, 0);
  EXPECT_EQ(report.first->b.other_rank, 2);
  // Rank 0 is right, so the values are those of the rank that is not.
  const ProbedRun values = run_probed(config, kModel, tokens(), {key, 3, 2}, key);
  const std::vector<float> right = values_of(values.record, key);
  const std::vector<float> wrong = values_of(values.record, key, 2);
  EXPECT_EQ(difference_of(right, wrong).first_index, 3);
  // What both runs have is a fault of both.
  EXPECT_TRUE(compare_probes(b.record, b.record).first);
}

// Of two replicas in two shards, ranks 1 and 3 hold the second half of a tensor.
TEST(Divergence, OfTensorsThatAreCutTheRanksOfThePartAreNamed) {
  const TrainConfig config = config_of("hsdp", 4);
  const ProbeKey key{2, 0, kState, "m of h.0.mlp.c_fc.weight"};
  ProbedRun a = run(config), b = a;
  std::vector<ProbePart*> second;  // half, of either replica
  std::int64_t begin = 0;
  for (ProbePart& part : b.record.parts) {
    if (part.key != key) continue;
    EXPECT_EQ(part.begin == 0, part.rank % 2 == 0) << part.rank;
    if (part.begin > 0) begin = part.begin;
    if (part.rank == 3) second.push_back(&part);
  }
  ASSERT_EQ(second.size(), 1u);
  ++second.front()->checksum.hash;
  const DivergenceReport report = compare_probes(a.record, b.record);
  ASSERT_TRUE(report.first);
  EXPECT_EQ(target_text(report.first->key), target_text(key));
  EXPECT_EQ(report.first->b.rank, 1);
  EXPECT_EQ(report.first->b.other_rank, 3);
  EXPECT_EQ(report.first->b.begin, begin);
  EXPECT_EQ(report.first->a.rank, -1);
}

TEST(Divergence, OptionsThatDifferAreNamedAndThoseOfOutputAreNot) {
  DivergenceResult result;
  result.a.header.options = {{"train.lr", "0.1"}, {"out", "\"a\""}, {"log.every", "1"}, {"x", "1"}};
  result.b.header.options = {{"train.lr", "0.2"},
                             {"out", "\"b\""},
                             {"log.every", "2"},
                             {"x", "1"},
                             {"parallel.strategy", "\"ddp\""}};
  EXPECT_EQ(lines_of(result).at(2),
            "Options that differ: parallel.strategy (A no such option, B ddp); train.lr (A 0.1, B "
            "0.2)");
  result.b.header.options = result.a.header.options;
  EXPECT_EQ(lines_of(result).at(2), "All options of the training are the same.");
  for (char c = 'a'; c < 'j'; ++c) result.b.header.options[std::string(1, c)] = "1";
  EXPECT_TRUE(
      has(lines_of(result).at(2), {"f (A no such option, B 1); 3 more in divergence.json"}));
}

TEST(Divergence, DataAndArithmeticThatDifferAreSaidAheadOfOptions) {
  DivergenceResult result;
  result.a.header.data_digest = "9 tokens 01";
  result.b.header.data_digest = "9 tokens 02";
  result.a.header.arithmetic = {{"cpu", "\"C\""}, {"cpu.isa", "\"v4\""}};
  result.b.header.arithmetic = {{"cpu", "\"C\""}, {"cpu.isa", "\"v3\""}};
  const std::string same = "All options of the training are the same.";
  std::vector<std::string> lines = lines_of(result);
  EXPECT_EQ(lines.at(2),
            "The data differ, although their path is the same: A has 9 tokens 01, B 9 tokens 02");
  EXPECT_EQ(lines.at(3), "The arithmetic differs: cpu.isa (A v4, B v3)");
  EXPECT_EQ(lines.at(4), same);
  auto json = to_json(result);
  EXPECT_EQ(json.at("a").at("data_digest"), "9 tokens 01");
  EXPECT_EQ(json.at("b").at("data_digest"), "9 tokens 02");
  EXPECT_EQ(
      json.at("arithmetic_that_differs"),
      testing::parse_ordered_json(R"([{"option": "cpu.isa", "a": "\"v4\"", "b": "\"v3\""}])"));
  // Of older records nothing is known.
  result.a.header.data_digest = "";
  lines = lines_of(result);
  EXPECT_EQ(lines.at(2), "The arithmetic differs: cpu.isa (A v4, B v3)");
  EXPECT_EQ(lines.at(4),
            "The record of A does not say which data it was made with, which may differ.");
  result.b.header.data_digest = "";
  result.b.header.arithmetic.clear();
  lines = lines_of(result);
  EXPECT_EQ(lines.at(2), same);
  EXPECT_EQ(lines.at(3), "Neither record says which data it was made with, which may differ.");
  EXPECT_EQ(lines.at(4),
            "The record of B does not say which arithmetic it was made with, which may differ.");
  json = to_json(result);
  EXPECT_TRUE(json.at("a").at("data_digest").is_null());
  EXPECT_EQ(json.at("arithmetic_that_differs").size(), 0u);
}

TEST(Divergence, RanksThatContradictAreTheSameInAnyOrderOfTheirParts) {
  const TrainConfig config = config_of("ddp", 3);
  const ProbeKey key{2, 0, kUpdated, "h.0.ln_1.weight"};
  const ProbedRun a = run(config);
  ProbedRun b = run(config, {key, 3, 1});
  const auto place = [&](const ProbePart& p, const std::array<int, 3>& order) {
    return std::pair(p.begin, order[static_cast<std::size_t>(p.rank)]);
  };
  std::array<int, 3> order = {0, 1, 2};
  do {
    std::ranges::sort(b.record.parts, {}, [&](const ProbePart& p) { return place(p, order); });
    const DivergenceReport report = compare_probes(a.record, b.record);
    ASSERT_TRUE(report.first);
    EXPECT_EQ(target_text(report.first->key), target_text(key));
    EXPECT_EQ(report.first->b.rank, 0) << fmt::format("{}", fmt::join(order, " "));
    EXPECT_EQ(report.first->b.other_rank, 1) << fmt::format("{}", fmt::join(order, " "));
  } while (std::ranges::next_permutation(order).found);
}

// What must not differ
// ----------------------------------------------------------------------------

TEST(Divergence, StrategiesRanksAndOptionsThatKeepBitsFindNothing) {
  const ProbedRun baseline = run(config_of("ddp", 1, 4));
  const auto same = [&](const char* name, const TrainConfig& config) {
    const ProbedRun other = run(config);
    for (const bool swapped : {false, true}) {
      const DivergenceReport report = swapped ? compare_probes(other.record, baseline.record)
                                              : compare_probes(baseline.record, other.record);
      EXPECT_FALSE(report.first) << name << ": " << text_of(report);
      EXPECT_EQ(reasons_of(report), "") << name;
      EXPECT_GT(report.num_compared, 1000) << name;
    }
  };
  same("itself", config_of("ddp", 1, 4));
  same("ddp", config_of("ddp", 4));
  same("ddp, 2 x 2", config_of("ddp", 2, 2));
  same("zero1", config_of("zero1", 4));
  same("zero2", config_of("zero2", 2, 2));
  same("zero3", config_of("zero3", 4));
  same("shard_grad_op", config_of("shard_grad_op", 2, 2));
  same("hsdp", config_of("hsdp", 4));
  same("hfsdp", config_of("hfsdp", 4));
  TrainConfig config = config_of("zero3", 2, 2);
  config.train.recompute = true;
  same("recompute", config);
  config = config_of("zero3", 2, 2);
  config.parallel.unit_min_numel = 1 << 20;
  same("one unit", config);
  config = config_of("zero3", 2, 2);
  config.offload = {.parameters = 0.5, .gradients = 0.5, .optimizer = 0.5, .threads = 1};
  same("offload", config);
}

TEST(Divergence, UpdatesDuringBackwardFindNothing) {
  TrainConfig config = config_of("zero3", 2, 2);
  config.train.grad_clip = 0;
  const ProbedRun a = run(config);
  config.train.overlap_optimizer = OverlapOptimizer::kInterleaved;
  config.parallel.strategy = "zero1";
  const DivergenceReport report = compare_probes(a.record, run(config).record);
  EXPECT_FALSE(report.first) << text_of(report);
  EXPECT_EQ(reasons_of(report), "");
}

// Other arithmetic
// --------------------------------------------------------------------------------

TEST(Divergence, OfAnotherDtypeTheFirstGatherDiffers) {
  TrainConfig config = config_of("zero3", 2);
  const ProbedRun a = run(config);
  config.precision.param = engine::DType::kBF16;
  const DivergenceReport report = compare_probes(a.record, run(config).record);
  ASSERT_TRUE(report.first);
  EXPECT_EQ(target_text(report.first->key), "gathered_forward:1:1:wte.weight");
  EXPECT_EQ(report.first->key.step, 1);
  EXPECT_EQ(report.first->a.dtype, "f32");
  EXPECT_EQ(report.first->b.dtype, "bf16");
  EXPECT_EQ(report.num_before, 0);
}

TEST(Divergence, OfAnotherRateTheUpdateDiffers) {
  TrainConfig config = config_of("zero3", 2);
  const ProbedRun a = run(config);
  config.train.weight_decay *= 1.5;
  const DivergenceReport report = compare_probes(a.record, run(config).record);
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.first->key.phase, kUpdated);
  EXPECT_EQ(report.first->key.step, 1);
}

TEST(Divergence, OfAGradientKeptOverMicroStepsTheSumsAreComparedAlone) {
  const ProbedRun a = run(config_of("zero3", 2, 2));
  TrainConfig config = config_of("zero3", 2, 2);
  config.train.accum_comm = AccumComm::kLast;
  const ProbedRun b = run(config);
  const DivergenceReport report = compare_probes(a.record, b.record);
  EXPECT_TRUE(has(reasons_of(report), {"gradient before reduction: with train.accum_comm=last"}));
  if (report.first) {
    EXPECT_EQ(report.first->key.phase, kReduced);
  }
  EXPECT_EQ(reasons_of(compare_probes(b.record, b.record)), "");
}

TEST(Divergence, OtherMicroBatchesAreNotCompared) {
  const ProbedRun a = run(config_of("zero3", 2));
  TrainConfig config = config_of("zero3", 1);
  config.train.batch = 2;  // as many samples in a step
  const DivergenceReport report = compare_probes(a.record, run(config).record);
  const std::string reasons = reasons_of(report);
  for (const ProbePhase phase : {kOutput, kOutputGradient, kGradient, kReduced}) {
    EXPECT_TRUE(
        has(reasons, {fmt::format("{}: in a step A makes 2 micro-batches of 1 samples, B 1 of 2",
                                  title_of(phase))}));
  }
  EXPECT_TRUE(has(reasons, {"gathered parameter (forward): A alone has it"}));
  ASSERT_TRUE(report.first);  // sums of other parts round otherwise
  EXPECT_GE(report.first->key.phase, kUpdated);
}

// Records
// -----------------------------------------------------------------------------------------

TEST(Divergence, StepsApartAreCountedOrRefused) {
  TrainConfig config = config_of("zero3", 2);
  config.log.probe_steps = "1:2";
  const ProbedRun a = run(config);
  config.log.probe_steps = "2:3";
  const ProbedRun b = run(config);
  const DivergenceReport report = compare_probes(a.record, b.record);
  EXPECT_EQ(report.first_step, 2);
  EXPECT_EQ(report.last_step, 2);
  EXPECT_FALSE(report.first);
  EXPECT_TRUE(has(reasons_of(report), {"steps that only A has", "steps that only B has"}));
  config.log.probe_steps = "3:3";
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>(
                      [&, c = run(config)] { compare_probes(a.record, c.record); }),
                  {"expected runs with a step in common, got steps 1 to 2 in A and 3 to 3 in B"}));
}

TEST(Divergence, OfRecordsThatBeginLateAFirstStepThatDiffersMayNotBeTheFirst) {
  TrainConfig config = config_of("zero3", 2);
  const auto hint = [&](const char* steps, std::int64_t step) {
    config.log.probe_steps = steps;
    const ProbedRun a = run(config), b = run(config, {{step, 0, kUpdated, "h.0.ln_1.weight"}, 3});
    const DivergenceResult result{.a = {"one", "a.jsonl", a.record.header},
                                  .b = {"two", "b.jsonl", b.record.header},
                                  .report = compare_probes(a.record, b.record)};
    EXPECT_TRUE(result.report.first);
    EXPECT_GT(result.report.num_before, 0);
    std::string text;
    for (const std::string& line : lines_of(result)) text += line;
    return has(text, {"the runs may have parted earlier"});
  };
  EXPECT_TRUE(hint("2:3", 2));
  EXPECT_FALSE(hint("2:3", 3));
  EXPECT_FALSE(hint("1:3", 1));
}

TEST(Divergence, RecordsWithoutATensorInCommonAreRefused) {
  const TrainConfig config = config_of("zero3", 2);
  const auto only = [&](const ProbeKey& key) {
    return run_probed(config, kModel, tokens(), {}, key);
  };
  const ProbedRun a = only({1, 1, kOutput, "h.0.output"});
  const ProbedRun b = only({1, 1, kOutput, "h.1.output"});
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { compare_probes(a.record, b.record); }),
                  {"expected runs with a tensor to compare, got none that both have: activation: "
                   "A alone has it; activation: B alone has it"}));
}

TEST(Divergence, AnotherTrainingIsRefusedByTheNameOfWhatDiffers) {
  ProbedRun a = run(config_of("zero3", 2)), b = a;
  a.record.header.options = {{"train.seed", "1"}, {"train.lr", "0.1"}};
  b.record.header.options = {{"train.seed", "1"}, {"train.lr", "0.2"}};
  EXPECT_FALSE(compare_probes(a.record, b.record).first);
  b.record.header.options["train.seed"] = "2";
  EXPECT_TRUE(
      has(error_of<engine::InvalidArgument>([&] { compare_probes(a.record, b.record); }),
          {"expected runs of one model, data and seed, got 1 in A and 2 in B (train.seed)"}));
  b.record.header.options["train.seed"] = "1";
  b.record.header.options["data.path"] = "\"/b\"";
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { compare_probes(a.record, b.record); }),
                  {"got no such option in A and \"/b\" in B (data.path)"}));
  const std::string begin(500, 'd');
  a.record.header.options["data.path"] = begin + "a" + begin;
  b.record.header.options["data.path"] = begin + "b" + begin;
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { compare_probes(a.record, b.record); }),
                  {"got ddd", "(data.path)"}));
  GptConfig wider = kModel;
  wider.dim = 18;
  const ProbedRun c = run_probed(config_of("zero3", 2), wider, tokens());
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>(
                      [&] { compare_probes(run(config_of("zero3", 2)).record, c.record); }),
                  {"expected runs of one model, got h.0.attn.c_attn.bias of shape (45) in A and "
                   "(54) in B"}));
}

TEST(Divergence, WhatSomeRanksHaveNotRecordedIsNotCompared) {
  ProbedRun a = run(config_of("zero3", 2));
  ProbedRun b = a;
  std::erase_if(b.record.parts,
                [](const ProbePart& p) { return p.rank == 1 && p.key.phase == kState; });
  const DivergenceReport report = compare_probes(a.record, b.record);
  EXPECT_FALSE(report.first) << text_of(report);
  EXPECT_TRUE(has(reasons_of(report),
                  {"optimizer state after the update: some ranks have not recorded their parts"}));
}

// Values
// ------------------------------------------------------------------------------------------

TEST(Divergence, SaysWhoHadAMicroBatchOnEachSide) {
  DivergenceResult result;
  result.a.header.ranks = 2;
  result.a.header.accum = 2;
  result.b.header.ranks = 4;
  result.b.header.accum = 1;
  result.report.first = Divergence{
      .key = {.step = 1, .micro_batch = 3, .tensor = "w"}, .shape = {1}, .a = {}, .b = {}};
  std::string text;
  for (const std::string& line : lines_of(result)) text += line + "\n";
  EXPECT_TRUE(has(
      text, {"micro-batch 3 (A: rank 0, micro-step 2; B: rank 2, micro-step 1)", "tensor w, "}));
  const auto first = to_json(result).at("first");
  EXPECT_EQ(first.at("a").at("rank"), 0);
  EXPECT_EQ(first.at("b").at("rank"), 2);
  result.report.first->key.visit = 2;
  EXPECT_TRUE(has(lines_of(result).at(6), {"tensor w, visit 2, "}));
}

TEST(Divergence, LinesAndJsonSayEachFigureOfTheirSide) {
  DivergenceResult result;
  result.a = {.name = "one", .path = "a.jsonl", .header = {.ranks = 2, .accum = 3}};
  result.b = {.name = "two", .path = "b.jsonl", .header = {.ranks = 6, .accum = 1}};
  for (ProbeHeader* header : {&result.a.header, &result.b.header}) {
    header->data_digest = "d";
    header->arithmetic = {{"cpu", "\"c\""}};
  }
  result.report = {.first_step = 5,
                   .last_step = 9,
                   .num_compared = 4321,
                   .num_before = 1234,
                   .num_differing = 77,
                   .not_compared = {{"why", 13}}};
  result.report.first = Divergence{.key = {.step = 7, .phase = kUpdated, .tensor = "w"},
                                   .shape = {4, 3, 5},
                                   .a = {.unit = "u", .dtype = "f32", .checksum = {}},
                                   .b = {.unit = "v", .dtype = "bf16", .checksum = {}}};
  result.report.first->a.checksum = {.hash = 0xab, .numel = 60, .max_abs = 1.5, .sum = -2.25};
  result.report.first->b.checksum = {.hash = 0xcd, .numel = 60, .max_abs = 3.5, .sum = 4.25};
  result.report.first->b.rank = 2;
  result.report.first->b.other_rank = 5;
  result.report.first->b.begin = 30;
  result.values = ValueDifference{
      .num_differing = 11, .first_index = 37, .a = 0.5, .b = 0.75, .max_abs = 8.5, .max_ulps = 19};
  std::string text;
  for (const std::string& line : lines_of(result)) text += line + "\n";
  EXPECT_EQ(text,
            "A: one (2 ranks x 3 micro-steps)\n"
            "B: two (6 ranks x 1 micro-step)\n"
            "All options of the training are the same.\n"
            "First difference: step 7, parameter after the update\n"
            "  unit u, tensor w, shape (4, 3, 5)\n"
            "  11 of 60 elements differ, the first at 37 = (2, 1, 2): A 0.5, B 0.75; largest "
            "difference 8.5, at most 19 ULPs\n"
            "  A: f32, unit u, largest 1.5, sum -2.25, checksum 00000000000000ab\n"
            "  B: bf16, unit v, largest 3.5, sum 4.25, checksum 00000000000000cd; rank 5 has other "
            "bits than rank 2 in the part from element 30 on\n"
            "1,234 checksums before it are equal; of all 4,321 of steps 5 to 9, 77 differ.\n"
            "Not compared (13): why\n");
  EXPECT_EQ(to_json(result), testing::parse_ordered_json(R"({
      "a": {"name": "one", "record": "a.jsonl", "ranks": 2, "accum": 3, "data_digest": "d",
            "failure": null},
      "b": {"name": "two", "record": "b.jsonl", "ranks": 6, "accum": 1, "data_digest": "d",
            "failure": null},
      "arithmetic_that_differs": [], "options_that_differ": [], "first_step": 5, "last_step": 9, "num_compared": 4321,
      "num_before_first": 1234, "num_differing": 77,
      "first": {"step": 7, "micro_batch": null, "phase": "updated", "unit": "u", "tensor": "w",
                "visit": 1, "shape": [4, 3, 5],
                "a": {"unit": "u", "dtype": "f32", "checksum": "00000000000000ab", "max_abs": 1.5,
                      "sum": -2.25},
                "b": {"unit": "v", "dtype": "bf16", "checksum": "00000000000000cd", "max_abs": 3.5,
                      "sum": 4.25, "ranks_that_differ": [2, 5], "from_element": 30},
                "values": {"num_differing": 11, "first_index": 37, "a": 0.5, "b": 0.75,
                           "max_abs_difference": 8.5, "max_ulps": 19}},
      "not_compared": [{"reason": "why", "count": 13}], "remark": null})"))
      << to_json(result);
}

TEST(Divergence, JsonSaysWhatIsNoNumber) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  DivergenceResult result;
  result.report.first =
      Divergence{.key = {.step = 1, .tensor = "w"}, .shape = {1}, .a = {}, .b = {}};
  result.report.first->a.checksum = {.numel = 1, .max_abs = kInfinity, .sum = -kInfinity};
  result.report.first->b.checksum = {.numel = 1, .max_abs = std::nan(""), .sum = 2.5};
  result.values = difference_of(std::vector<float>{static_cast<float>(-kInfinity)},
                                std::vector<float>{std::nanf("")});
  const auto first = to_json(result).at("first");
  EXPECT_EQ(first.at("a").at("max_abs"), "inf");
  EXPECT_EQ(first.at("a").at("sum"), "-inf");
  EXPECT_EQ(first.at("b").at("max_abs"), "nan");
  EXPECT_EQ(first.at("b").at("sum"), 2.5);
  EXPECT_EQ(first.at("values").at("a"), "-inf");
  EXPECT_EQ(first.at("values").at("b"), "nan");
  EXPECT_EQ(first.at("values").at("max_abs_difference"), "nan");
}

TEST(Divergence, DistancesAreThoseOfNeighbouringFloats) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const auto ulps = [](float a, float b) {
    return difference_of(std::vector<float>{a}, std::vector<float>{b}).max_ulps;
  };
  EXPECT_EQ(ulps(1, std::nextafter(1.0f, 2.0f)), 1);
  EXPECT_EQ(ulps(-tiny, tiny), 2);
  EXPECT_EQ(ulps(-1, std::nextafter(-1.0f, 0.0f)), 1);
  EXPECT_EQ(ulps(0.0f, -0.0f), 0);
  EXPECT_EQ(difference_of(std::vector<float>{0.0f}, std::vector<float>{-0.0f}).num_differing, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a = {1, nan, 3, 4}, b = {1, 2, 3.5f, 8};
  const ValueDifference d = difference_of(a, b);
  EXPECT_EQ(d.num_differing, 3);
  EXPECT_EQ(d.first_index, 1);
  EXPECT_TRUE(std::isnan(d.max_abs));
  EXPECT_EQ(d.max_ulps, ulps(4, 8)) << "of what has neighbours";
  EXPECT_EQ(difference_of(std::vector<float>{3, 4}, std::vector<float>{3.5f, 8}).max_abs, 4);
}

}  // namespace
}  // namespace tessera::tools

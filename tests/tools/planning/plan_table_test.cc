// Plans side by side: each figure against one that is computed here.
#include "tools/planning/plan_table.h"
#include "tests/testing/json.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/error.h"
#include "shard/placement.h"
#include "tests/testing/errors.h"
#include "tools/planning/strategy_list.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {
namespace {

using testing::has;

// Every parameter has a multiple of 128 elements for each of 4 ranks, so nothing is padded.
constexpr std::int64_t kDim = 512, kVocab = 256, kSeq = 64, kLayers = 3, kBatch = 2, kAccum = 3;
constexpr std::int64_t kRoot = kDim * (kVocab + kSeq + 2);
constexpr std::int64_t kBlock = 12 * kDim * kDim + 13 * kDim;
constexpr std::int64_t kAll = kRoot + kLayers * kBlock;

TransformerConfig config_of(const std::string& strategy) {
  const StrategyChoice choice = parse_strategy(strategy);
  TransformerConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.strategy = choice.strategy;
  config.parallel.shard_ranks = choice.shard_ranks;
  config.model = {.layers = kLayers, .dim = kDim, .seq = kSeq, .vocab = kVocab};
  config.train.batch = kBatch;
  config.train.accum = kAccum;
  return config;
}

PlanRow row_of(const TransformerConfig& config, const PlanTarget& target) {
  const std::unique_ptr<LanguageModel> model = config.model_config().make();
  return plan_row(config.parallel.strategy, config, *model, target);
}

// What one of `n` ranks sends of `numel` elements of 4 bytes that are gathered, or reduced to
// parts.
std::int64_t ring(std::int64_t n, std::int64_t numel) { return 4 * numel / n * (n - 1); }

// By hand, on 4 ranks: what docs/strategies.md says.
TEST(PlanTable, BytesAreThoseOfTheFormulas) {
  constexpr std::int64_t kGathered = kRoot + (2 * kLayers - 1) * kBlock;
  const std::map<std::string, std::int64_t> expected = {
      {"ddp", kAccum * 2 * ring(4, kAll)},
      {"zero1", kAccum * 2 * ring(4, kAll) + ring(4, kAll)},
      {"zero2", kAccum * ring(4, kAll) + ring(4, kAll)},
      {"zero3", kAccum * (ring(4, kGathered) + ring(4, kAll))},
      {"shard_grad_op", kAccum * 2 * ring(4, kAll)},
      // Two replicas hand on the sums of a half: a broadcast by each.
      {"hsdp:2", kAccum * (ring(2, kGathered) + ring(2, kAll) + 2 * ring(2, kAll / 2))},
      {"hybrid_zero2:2", kAccum * (ring(2, kAll) + 2 * ring(2, kAll / 2)) + ring(2, kAll)},
      {"hfsdp:2",
       kAccum * (ring(2, kGathered) + ring(2, kAll) + 2 * ring(2, kAll / 2)) + ring(2, kAll / 2)}};
  ASSERT_EQ(parse_strategies("all").size(), expected.size());
  for (const auto& [strategy, sent] : expected) {
    const PlanRow row = row_of(config_of(strategy), {.num_ranks = 4});
    std::int64_t values = 0;  // norms and losses, 56 and some bytes
    for (const PlannedCollective& c : row.plan.collectives) {
      if (c.label == "norm" || c.label == "values") values += c.bytes_sent;
    }
    EXPECT_LT(values, 600);
    EXPECT_EQ(row.step().traffic.bytes_sent - values, sent) << strategy;
  }
}

// What a rank holds less than under ddp, where the peak is at the end of backward for all of them.
TEST(PlanTable, MemoryDiffersByWhatIsCut) {
  constexpr std::int64_t kWhole = 4 * kAll, kPart = kWhole / 4;
  constexpr std::int64_t kTwoSlots = 4 * (kRoot + 2 * kBlock), kAllSlots = kWhole;
  constexpr std::int64_t kStates = 2 * (kWhole - kPart), kSums = kWhole - kPart,
                         kParameters = kWhole - kPart;
  const std::map<std::string, std::int64_t> less = {
      {"zero1", kStates},
      {"zero2", kStates + kSums},
      {"zero3", kStates + kSums + kParameters - kTwoSlots},
      {"shard_grad_op", kStates + kSums + kParameters - kAllSlots}};
  const std::int64_t ddp = row_of(config_of("ddp"), {.num_ranks = 4}).peak_nbytes;
  for (const auto& [strategy, nbytes] : less) {
    const PlanRow row = row_of(config_of(strategy), {.num_ranks = 4});
    EXPECT_NEAR(static_cast<double>(ddp - row.peak_nbytes), static_cast<double>(nbytes), 512)
        << strategy;
    EXPECT_EQ(row.peak_nbytes, peak_nbytes(row.plan));
  }
}

// Where computing takes no time a step is what is sent over the link, and where sending takes none
// and memory is read in none, what is computed: nearly the model's own products.
TEST(PlanTable, TimesAreThoseOfTheRates) {
  TransformerConfig config = config_of("ddp");
  const PlanTarget slow_link = {
      .num_ranks = 4, .rates = {.flops_per_s = 1e18, .bytes_per_s = 1e18, .link_bytes_per_s = 1e6}};
  const PlanRow sent = row_of(config, slow_link);
  const double latency_ms =
      1e3 * slow_link.rates.link_latency_s * static_cast<double>(sent.plan.collectives.size());
  const double link_ms = static_cast<double>(sent.step().traffic.bytes_sent) / 1e6 * 1e3;
  EXPECT_NEAR(sent.step().step_ms, link_ms + latency_ms, 0.01 * link_ms);
  EXPECT_NEAR(sent.tokens_per_s() * sent.step().step_ms, 1e3 * 4 * kBatch * kAccum * kSeq, 1e-3);

  const PlanRow computed = row_of(config, {.num_ranks = 4,
                                           .rates = {.flops_per_s = 1e9,
                                                     .bytes_per_s = 1e18,
                                                     .link_bytes_per_s = 1e18,
                                                     .link_latency_s = 0}});
  // Per sequence: 2 operations for each weight of the blocks and the head and each token, and the
  // products of attention of each token with those before it; backward twice as many.
  const double per_sequence =
      3 * (kLayers * (2.0 * 12 * kDim * kDim * kSeq + 4.0 * kDim * kSeq * (kSeq + 1) / 2) +
           2.0 * kVocab * kDim * kSeq);
  const double flops = kBatch * kAccum * per_sequence;
  EXPECT_DOUBLE_EQ(computed.flops, flops);
  EXPECT_DOUBLE_EQ(computed.mfu(), flops / (computed.step().step_ms * 1e-3 * 1e9));
  EXPECT_GT(computed.mfu(), 0.8);
  EXPECT_LE(computed.mfu(), 1);
}

TEST(PlanTable, WhereAStrategyCutsAsAnotherPlansAreEqual) {
  const PlanTarget four = {.num_ranks = 4}, one = {.num_ranks = 1};
  const auto equal = [&](const char* a, const char* b, const PlanTarget& target) {
    return are_equal(row_of(config_of(a), target), row_of(config_of(b), target));
  };
  EXPECT_TRUE(equal("zero3", "fsdp", four));
  EXPECT_TRUE(equal("zero3", "hsdp:4", four));
  EXPECT_TRUE(equal("zero3", "hfsdp:4", four));
  EXPECT_TRUE(equal("zero2", "hybrid_zero2:4", four));
  EXPECT_TRUE(equal("ddp", "hybrid_zero2:1", four));
  EXPECT_TRUE(equal("ddp", "zero1", one));
  EXPECT_TRUE(equal("ddp", "zero2", one));
  EXPECT_TRUE(equal("zero3", "hsdp", one));
  EXPECT_FALSE(equal("zero1", "zero2", four));
  EXPECT_FALSE(equal("zero2", "zero3", four));
  EXPECT_FALSE(equal("hsdp:2", "hsdp:4", four));
}

// Figures that are all different, so that none can stand for another: of 4 ranks 1,000 tokens in
// half a second, a quarter of what the rates allow.
PlanRow made(const std::string& name, std::int64_t peak, double step_ms) {
  PlanRow row{.name = name,
              .target = {.num_ranks = 4,
                         .rates = {.flops_per_s = 8e12,
                                   .bytes_per_s = 2e12,
                                   .link_bytes_per_s = 5e10,
                                   .link_latency_s = 0}},
              .peak_nbytes = peak,
              .tokens = 1000,
              .flops = 1e12};
  StepRecord step;
  step.step_ms = step_ms;
  step.exposed_comm_ms = 30;
  step.traffic = {.num_collectives = 7, .bytes_sent = 3 << 20};
  step.step_memory.peak_total_nbytes = peak - 1;
  step.step_host_memory.peak_total_nbytes = 5 << 10;
  row.plan.steps = {StepRecord(), step};
  return row;
}

std::string text_of(const std::vector<PlanRow>& rows) {
  return fmt::format("{}\n", fmt::join(table_lines(rows), "\n"));
}

TEST(PlanTable, EachFigureStandsInItsColumn) {
  EXPECT_EQ(text_of({made("zero9", 2LL << 30, 500)}),
            "4 ranks on CPUs, at 8 TFLOP/s, 2 TB/s of memory and 50 GB/s between ranks\n"
            "        memory  on the host     sent      step    waits  tokens/s     MFU\n"
            "zero9  2.0 GiB      5.0 KiB  3.0 MiB  500.0 ms  30.0 ms     2,000  25.0 %\n"
            "fastest: zero9 with 2,000 tokens/s\n"
            "least memory: zero9 with 2.0 GiB\n");
  PlanRow budgeted = made("b", 2LL << 30, 500);
  budgeted.budget_nbytes = 3LL << 30;
  budgeted.changes = {{"parallel.prefetch", "0"}};
  const auto json = testing::parse_json(
      table_record({made("a", 1 << 20, 250), budgeted, {.name = "c", .refusal = "why"}}).text());
  EXPECT_EQ(json, testing::parse_json(R"({"configurations": [
      {"name": "a", "ranks": 4, "peak_bytes": 1048576, "host_peak_bytes": 5120,
       "sent_bytes": 3145728, "num_collectives": 7, "step_ms": 250.0, "exposed_comm_ms": 30.0,
       "tokens_per_s": 4000.0, "mfu": 0.5},
      {"name": "b", "ranks": 4, "peak_bytes": 2147483648, "host_peak_bytes": 5120,
       "sent_bytes": 3145728, "num_collectives": 7, "step_ms": 500.0, "exposed_comm_ms": 30.0,
       "tokens_per_s": 2000.0, "mfu": 0.25, "budget_bytes": 3221225472, "fits": true,
       "options": {"parallel.prefetch": 0}},
      {"name": "c", "refusal": "why"}], "fastest": ["a"]})"));
}

TEST(PlanTable, ATieIsToldAsOne) {
  const std::vector<PlanRow> rows = {made("a", 5 << 20, 101), made("b", 5 << 20, 100.4),
                                     made("c", 4 << 20, 100), made("d", 3 << 20, 100.6)};
  EXPECT_EQ(fastest_of(rows), (std::vector<std::size_t>{2, 1}));
  EXPECT_TRUE(has(text_of(rows), {"fastest, a tie within 0.5 %: c and b with 9,960 to 10,000 "
                                  "tokens/s; of these c needs least memory\n",
                                  "least memory: d with 3.0 MiB\n"}));
  // By tokens a second, not by the time of a step.
  std::vector<PlanRow> larger = {made("a", 1, 100), made("b", 1, 150)};
  larger[1].tokens = 2000;
  EXPECT_EQ(fastest_of(larger), (std::vector<std::size_t>{1}));
}

TEST(PlanTable, TheFastestIsOneThatFits) {
  std::vector<PlanRow> rows = {made("a", 5 << 20, 100), made("b", 3 << 20, 200),
                               made("c", 2 << 20, 300)};
  for (PlanRow& row : rows) row.budget_nbytes = 4 << 20;
  rows[0].exceeds_budget = true;
  rows[1].changes = {{"parallel.prefetch", "0"}, {"train.recompute", "2"}};
  EXPECT_TRUE(has(text_of(rows),
                  {"  fits\n", "     no\n", "changed\n", "    yes\n",
                   "\nb fits with parallel.prefetch=0, train.recompute=2\n",
                   "\nfastest that fits: b with 5,000 tokens/s", "\nleast memory: c with 2.0"}));
  for (PlanRow& row : rows) row.exceeds_budget = true;
  EXPECT_TRUE(has(text_of(rows), {"\nnone of them fits\n"}));
  EXPECT_TRUE(fastest_of(rows).empty());
}

TEST(StrategyList, AllIsEveryStrategyOnce) {
  std::vector<std::string> names;
  for (const StrategyChoice& choice : parse_strategies("all")) {
    names.push_back(choice.strategy);
    EXPECT_EQ(choice.shard_ranks, 0);
  }
  // Those of the trainer, but for two names of zero3.
  std::vector<std::string> presets = shard::Placement::preset_names();
  std::erase(presets, "fsdp");
  std::erase(presets, "full_shard");
  std::ranges::sort(names);
  std::ranges::sort(presets);
  EXPECT_EQ(names, presets);
  EXPECT_EQ(parse_strategies("hsdp:2,ddp").at(0).shard_ranks, 2);
  EXPECT_EQ(parse_strategies("hsdp:2,ddp").at(0).strategy, "hsdp");
  for (const char* bad : {"", "ddp,", "ddp,ddp", "dpp", "zero3:2", "hsdp:0", "hsdp:x", "hsdp:02"}) {
    EXPECT_FALSE(testing::error_of<engine::InvalidArgument>([&] { parse_strategies(bad); }).empty())
        << bad;
  }
}

}  // namespace
}  // namespace tessera::tools

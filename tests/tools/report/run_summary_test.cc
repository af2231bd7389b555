// What is told of steps: lines, medians, shares, advice.
#include "tools/report/run_summary.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tools/config/train_config.h"
#include "tools/report/advice.h"
#include "tools/report/step_text.h"

namespace tessera::tools {
namespace {

using testing::has;

StepRecord record_of(std::int64_t step, double step_ms) {
  StepRecord record{.step = step, .loss = 2.5, .grad_norm = 0.5f, .lr = 1e-3, .step_ms = step_ms};
  record.items_per_s = 1e6 / step_ms;
  record.exposed_comm_ms = 0.25 * step_ms;
  record.data_ms = 0.125 * step_ms;
  record.compute_ms = 0.5 * step_ms;
  record.optimizer_ms = 0.0625 * step_ms;
  record.memory.peak_total_nbytes = 3 << 20;
  record.memory.peak_nbytes[static_cast<std::size_t>(engine::Category::kActivation)] = 2 << 20;
  return record;
}

/// Of `num_steps` steps of 1, 2, 3, ... ms, the first of them slow, of a process that went on from
/// after step `start`.
RunSummary::Figures figures_of(std::int64_t num_steps, std::int64_t start = 0) {
  RunSummary summary;
  for (std::int64_t i = 1; i <= num_steps; ++i) {
    summary.add(record_of(start + i, i == 1 ? 1e6 : static_cast<double>(i)), {});
  }
  return summary.figures().value();
}

TEST(StepRecord, PartsAndTheRestAreTheStep) {
  StepRecord record = record_of(1, 16);
  EXPECT_EQ(record.other_ms(), 1.0);
  record.optimizer_ms.reset();
  EXPECT_EQ(record.other_ms(), 2.0);
  record.compute_ms.reset();  // a graph's
  EXPECT_FALSE(record.other_ms().has_value());
}

TEST(StepText, ColumnsStayWhereTheyAre) {
  StepTextOptions options{.num_steps = 12345, .items = "tokens", .peak_percent = 7, .eta = "0:30"};
  StepRecord small = record_of(1, 1.5), large = record_of(12345, 4000);
  large.loss = 11.25;
  large.grad_norm = 999;
  large.items_per_s = 1234567;
  const std::string a = step_text(small, options), b = step_text(large, options);
  EXPECT_TRUE(has(a, {"step     1/12345 | loss  2.5000 | norm   0.500 | lr 1.00e-03 |",
                      "1.5 ms: ", " tokens/s,   7 % of peak |   3.0 MiB | ETA 0:30"}));
  // A rate above what was measured as the peak.
  options.peak_percent = 435;
  EXPECT_TRUE(has(step_text(small, options), {" tokens/s,    above peak |   3.0 MiB |"}));
  std::size_t num_bars = 0;
  for (std::size_t at = a.find(" | "); at != std::string::npos; at = a.find(" | ", at + 1)) {
    EXPECT_EQ(b.substr(at, 3), " | ") << a << "\n" << b;
    ++num_bars;
  }
  EXPECT_EQ(num_bars, 7u);
}

TEST(StepText, LeavesOutWhatATerminalHasNoRoomFor) {
  StepTextOptions options{.num_steps = 700, .items = "tokens", .peak_percent = 7, .eta = "0:30"};
  const StepRecord record = record_of(1, 1.5);
  const std::string whole = step_text(record, options);
  const std::string least = "step     1/700 | loss  2.5000 |     1.5 ms |";
  std::string last = whole;
  std::size_t num_lines = 1;
  for (std::size_t columns = whole.size(); columns >= 75; --columns) {
    options.columns = columns;
    const std::string line = step_text(record, options);
    EXPECT_LE(line.size(), columns);
    EXPECT_TRUE(
        has(line, {"step     1/700 | loss  2.5000 | ", "1.5 ms", " tokens/s", "| ETA 0:30"}));
    EXPECT_LE(line.size(), last.size());
    if (line != last) ++num_lines;
    last = line;
  }
  EXPECT_EQ(num_lines, 6u) << last;  // five parts go, one after the other
  EXPECT_TRUE(last.starts_with(least)) << last;
  options.columns = whole.size();
  EXPECT_EQ(step_text(record, options), whole);
}

TEST(StepText, SaysWhatIsKnownAlone) {
  StepRecord record = record_of(1, 16);
  EXPECT_TRUE(has(step_text(record, {}), {"compute", "exposed comm", "optimizer", "data"}));
  record.compute_ms.reset();
  record.optimizer_ms.reset();
  const std::string text = step_text(record, {});
  EXPECT_TRUE(has(text, {"exposed comm", "data"}));
  for (const char* unknown : {"compute", "optimizer", "of peak"}) {
    EXPECT_EQ(text.find(unknown), std::string::npos) << text;
  }
}

TEST(StepText, AStatusLineSaysHowFarARunHasCome) {
  EXPECT_TRUE(has(status_text(record_of(3, 8), {.num_steps = 4, .items = "tokens", .eta = "0:30"}),
                  {"  75 % step 3/4 | ETA 0:30 | loss 2.5000 | 8.0 ms | 125000 tokens/s"}));
  EXPECT_TRUE(has(status_text(record_of(4, 8), {.num_steps = 4}), {"=] 100 % step 4/4 |"}));
}

TEST(StepText, NbytesHaveTheirUnit) {
  EXPECT_EQ(nbytes_text(0), "0 B");
  EXPECT_EQ(nbytes_text(1023), "1023 B");
  EXPECT_EQ(nbytes_text(1024), "1.0 KiB");
  EXPECT_EQ(nbytes_text(1536), "1.5 KiB");
  EXPECT_EQ(nbytes_text(40.0 * (1 << 30)), "40.0 GiB");
  EXPECT_EQ(nbytes_text(0x1p20 - 1), "1.0 MiB");
  EXPECT_EQ(nbytes_text(1.5 * 0x1p40), "1.5 TiB");
}

TEST(StepText, DurationsHaveTheirUnit) {
  EXPECT_EQ(duration_text(0), "0 ms");
  EXPECT_EQ(duration_text(0.0085), "8.50 us");
  EXPECT_EQ(duration_text(0.25), "250.0 us");
  EXPECT_EQ(duration_text(0.99999), "1.00 ms");
  EXPECT_EQ(duration_text(12.34), "12.3 ms");
  EXPECT_EQ(duration_text(999.99), "1.00 s");
  EXPECT_EQ(duration_text(102904.3), "102.9 s");
}

TEST(StepText, RatesHaveTheirUnit) {
  EXPECT_EQ(rate_text(0.08, "B/s"), "80 MB/s");
  EXPECT_EQ(rate_text(2.5, "B/s"), "2.5 GB/s");
  EXPECT_EQ(rate_text(989'500, "FLOP/s"), "989.5 TFLOP/s");
  EXPECT_EQ(rate_text(1e-9, "B/s"), "1 B/s");
  EXPECT_EQ(rate_text(999.99, "FLOP/s"), "1 TFLOP/s");
}

TEST(RunSummary, LeavesTheWarmupOut) {
  EXPECT_FALSE(RunSummary().figures().has_value());
  EXPECT_EQ(figures_of(1).num_warmup, 0);
  EXPECT_EQ(figures_of(1).step_ms.median, 1e6);
  EXPECT_EQ(figures_of(2).num_warmup, 1);
  EXPECT_EQ(figures_of(2).step_ms.median, 2);
  EXPECT_EQ(figures_of(50).num_warmup, 5);
  EXPECT_EQ(figures_of(1000).num_warmup, 10);
  EXPECT_EQ(figures_of(1000).num_steps, 990);
}

// Of a run that was resumed the first steps are as slow as of any other.
TEST(RunSummary, TheWarmupIsThatOfTheProcess) {
  const RunSummary::Figures f = figures_of(4, 4);
  EXPECT_EQ(f.num_warmup, 1);
  EXPECT_EQ(f.num_steps, 3);
  EXPECT_DOUBLE_EQ(f.step_ms.median, 3);
  EXPECT_EQ(figures_of(1, 1000).num_warmup, 0);
  EXPECT_EQ(figures_of(50, 1000).num_warmup, 5);
  EXPECT_EQ(figures_of(50, 1000).num_steps, 45);
  EXPECT_EQ(figures_of(10'005, 1'000'000).num_warmup, 10);
  EXPECT_EQ(figures_of(10'005, 1'000'000).num_steps, 9'995) << "the first five are forgotten";
}

TEST(RunSummary, MedianAndSpreadAreThoseOfTheSteps) {
  const RunSummary::Figures f = figures_of(12);  // 2 to 12 ms
  EXPECT_EQ(f.num_steps, 11);
  EXPECT_DOUBLE_EQ(f.step_ms.median, 7);
  EXPECT_DOUBLE_EQ(f.step_ms.p10, 3);
  EXPECT_DOUBLE_EQ(f.step_ms.p90, 11);
  EXPECT_DOUBLE_EQ(f.items_per_s.median, 1e6 / 7);
}

TEST(RunSummary, SharesAreOfTheTimeOfAllSteps) {
  const RunSummary::Figures f = figures_of(12);
  ASSERT_EQ(f.parts.size(), 5u);
  EXPECT_DOUBLE_EQ(f.share("compute"), 0.5);
  EXPECT_DOUBLE_EQ(f.share("exposed comm"), 0.25);
  EXPECT_DOUBLE_EQ(f.share("optimizer"), 0.0625);
  EXPECT_DOUBLE_EQ(f.share("data"), 0.125);
  EXPECT_DOUBLE_EQ(f.share("other"), 0.0625);
  EXPECT_EQ(f.share("nothing"), 0);
}

TEST(RunSummary, OfAGraphThereAreWaitsAlone) {
  RunSummary summary;
  StepRecord record = record_of(1, 16);
  record.compute_ms.reset();
  record.optimizer_ms.reset();
  summary.add(record, {});
  const auto parts = summary.figures().value().parts;
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].name, "exposed comm");
  EXPECT_EQ(parts[1].name, "data");
}

TEST(RunSummary, KeepsWhatALongRunDidLast) {
  const RunSummary::Figures f = figures_of(25'000);
  EXPECT_EQ(f.num_steps, 10'000);
  EXPECT_DOUBLE_EQ(f.step_ms.median, (15'001 + 25'000) / 2.0);
}

TEST(RunSummary, RowsAndRecordSayTheSame) {
  RunSummary summary;
  for (int step = 1; step <= 3; ++step) summary.add(record_of(step, 10), 40 + step);
  StepRecord skipped = record_of(4, 10);
  skipped.skipped = "w";
  summary.add(skipped, 44);
  const RunSummary::Figures f = summary.figures().value();
  std::string text;
  for (const auto& [label, row] : RunSummary::rows(f, "tokens")) text += label + ": " + row + "\n";
  EXPECT_TRUE(has(text, {"steps: 3 measured, 1 before them left out; 1 update skipped",
                         "step: 10.0 ms median, 10.0 to 10.0 ms", "compute 50.0 %",
                         "100000 tokens/s median, 43 % of the peak", "3.0 MiB at the peak",
                         "activation 2.0 MiB"}));
  RunSummary::Figures above = f;
  above.peak_percent = 435;
  for (const auto& [label, row] : RunSummary::rows(above, "tokens")) {
    if (label != "speed") continue;
    EXPECT_EQ(row,
              "100000 tokens/s median, above the peak measured at the start, while other "
              "programs ran");
  }
  const auto json = testing::parse_json(RunSummary::record(f, "tokens").text());
  EXPECT_EQ(json.at("steps"), 3);
  EXPECT_EQ(json.at("warmup_steps"), 1);
  EXPECT_EQ(json.at("step_ms").at("median"), 10.0);
  EXPECT_EQ(json.at("tokens_per_s").at("p90"), 1e5);
  EXPECT_EQ(json.at("share").at("exposed_comm"), 0.25);
  EXPECT_EQ(json.at("peak_percent"), 43.0);
  EXPECT_EQ(json.at("peak_bytes"), 3 << 20);
}

TEST(RunSummary, MoreThanThePeakSaysWhy) {
  for (const double percent : {100.0, 153.0}) {
    RunSummary summary;
    summary.add(record_of(1, 10), percent);
    const auto rows = RunSummary::rows(summary.figures().value(), "tokens");
    EXPECT_TRUE(rows[3].second.ends_with(
        percent > 100 ? "s median, above the peak measured at the start, while other programs ran"
                      : "s median, 100 % of the peak measured at the start"))
        << rows[3].second;
    const std::string step =
        step_text(record_of(1, 10), {.items = "tokens", .peak_percent = percent});
    EXPECT_TRUE(
        has(step, {percent > 100 ? "tokens/s,    above peak |" : "tokens/s, 100 % of peak |"}));
  }
}

/// Of a step that holds and sends so much, `host` of it on the host.
StepRecord step_with(std::int64_t step, std::int64_t peak, std::optional<std::int64_t> host,
                     std::int64_t sent) {
  StepRecord record = record_of(step, 10);
  record.memory.peak_total_nbytes = peak;
  if (host) record.host_memory = engine::MemoryStats{.peak_total_nbytes = *host};
  record.traffic.bytes_sent = sent;
  return record;
}

TEST(RunSummary, WhatWasPlannedStandsNextToWhatWasMeasured) {
  RunSummary summary;
  std::map<std::int64_t, StepRecord> plan;
  // The run began after step 10; step 11 is its warm-up.
  for (const std::int64_t step : {11, 12, 13, 14}) {
    const std::int64_t peak = step << 20;
    summary.add(step_with(step, peak, 3 << 20, step == 11 ? 9 << 20 : 5 << 10), {});
    plan[step] = step_with(step, peak - (1 << 19), 2 << 20, step == 11 ? 1 : 4 << 10);
  }
  EXPECT_FALSE(summary.figures().value().planned.has_value());
  summary.add_plan([&](std::int64_t step) -> const StepRecord& { return plan.at(step); });
  const RunSummary::Figures f = summary.figures().value();
  std::string text;
  for (const auto& [label, row] : RunSummary::rows(f, "tokens")) text += label + ": " + row + "\n";
  EXPECT_TRUE(has(text, {"memory: 14.0 MiB at the peak of rank 0, planned 13.5 MiB (largest: ",
                         "\non host: 3.0 MiB at the peak of rank 0, planned 2.0 MiB\n",
                         "\nsent: 5.0 KiB a step by rank 0, planned 4.0 KiB\n"}));
  const auto json = testing::parse_json(RunSummary::record(f, "tokens").text());
  EXPECT_EQ(json.at("peak_bytes"), 14 << 20);
  EXPECT_EQ(json.at("host_peak_bytes"), 3 << 20);
  EXPECT_EQ(json.at("sent_bytes"), 5 << 10);
  EXPECT_EQ(json.at("planned"), (nlohmann::json{{"peak_bytes", (14 << 20) - (1 << 19)},
                                                {"host_peak_bytes", 2 << 20},
                                                {"sent_bytes", 4 << 10}}));
}

TEST(RunSummary, WithoutAPlanNothingIsSaidToBePlanned) {
  RunSummary summary;
  for (const std::int64_t sent : {8, 6, 2, 4, 10}) summary.add(step_with(1, 100, {}, sent), {});
  const RunSummary::Figures f = summary.figures().value();
  EXPECT_EQ(f.measured.sent_nbytes, 4) << "of 6, 2 and 4";
  std::string text;
  for (const auto& [label, row] : RunSummary::rows(f, "tokens")) text += label + ": " + row + "\n";
  EXPECT_TRUE(has(text, {"memory: 100 B at the peak of rank 0 (largest", "sent: 4 B a step"}));
  for (const char* untold : {"planned", "host"}) {
    EXPECT_EQ(text.find(untold), std::string::npos) << text;
    EXPECT_EQ(RunSummary::record(f, "tokens").text().find(untold), std::string::npos);
  }
}

TEST(RunSummary, NamesTheThreeLargestCategoriesOfMemoryInTheirOrder) {
  using engine::Category;
  StepRecord record = record_of(1, 2);
  for (const auto& [category, mib] : std::map<Category, std::int64_t>{{Category::kGradient, 4},
                                                                      {Category::kActivation, 2},
                                                                      {Category::kOptimizer, 8},
                                                                      {Category::kWorkspace, 3}}) {
    record.memory.peak_nbytes[static_cast<std::size_t>(category)] = mib << 20;
  }
  RunSummary summary;
  summary.add(record, {});
  std::string text;
  for (const auto& [label, row] : RunSummary::rows(summary.figures().value(), "tokens")) {
    text += row + "\n";
  }
  EXPECT_TRUE(has(text, {"(largest: optimizer 8.0 MiB, gradient 4.0 MiB, workspace 3.0 MiB)\n"}));
}

/// Figures of a calm run with these shares.
RunSummary::Figures calm(double exposed, double optimizer, double data) {
  RunSummary::Figures f;
  f.num_steps = 100;
  f.step_ms = {.median = 10, .p10 = 9.5, .p90 = 10.5};
  f.parts = {{"compute", 1 - exposed - optimizer - data},
             {"exposed comm", exposed},
             {"optimizer", optimizer},
             {"data", data}};
  return f;
}

std::string advised(const RunSummary::Figures& f, const TrainConfig& config = {},
                    const RunPlace& place = {.num_ranks = 2, .num_gpus = 0, .num_cores = 2}) {
  std::string text;
  for (const std::string& line : advice(f, config, place)) text += line + "\n";
  return text;
}

TEST(Advice, SaysNothingOfWhatIsWell) {
  EXPECT_EQ(advised(calm(0.05, 0.1, 0.01)), "");
  RunSummary::Figures few = calm(0.5, 0.3, 0.1);
  few.num_steps = 4;
  EXPECT_EQ(advised(few), "");
  EXPECT_EQ(advised(calm(0.5, 0, 0), {}, {.num_ranks = 1, .num_gpus = 0, .num_cores = 2}), "");
}

TEST(Advice, OfExposedCommunicationFollowsTheConfiguration) {
  TrainConfig config;
  config.parallel.prefetch = 0;
  EXPECT_EQ(advised(calm(0.2, 0, 0), config),
            "exposed communication is 20 % of a step: no unit is gathered ahead; try "
            "--parallel.prefetch=1 (same bits, memory of one unit more)\n");
  config.parallel.prefetch = 1;
  EXPECT_EQ(advised(calm(0.304, 0, 0), config),
            "exposed communication is 30 % of a step: try --parallel.prefetch=2 (same bits, memory "
            "of one unit more)\n");
  const RunPlace gpus{.num_ranks = 2, .num_gpus = 2, .num_cores = 2};
  EXPECT_TRUE(has(advised(calm(0.2, 0, 0), config, gpus),
                  {"--parallel.prefetch=2 (memory of one unit more)"}));
  config.parallel.canonical = true;
  EXPECT_TRUE(has(advised(calm(0.2, 0, 0), config, gpus),
                  {"--parallel.prefetch=2 (same bits, memory of one unit more)"}));
  config.parallel.reductions_in_flight = 0;
  EXPECT_TRUE(
      has(advised(calm(0.2, 0, 0), config), {"try --parallel.reductions_in_flight=1 (same"}));
  config.parallel.reductions_in_flight = 1;
  config.parallel.strategy = "hsdp";  // whose replicas have one rank
  EXPECT_TRUE(has(advised(calm(0.2, 0, 0), config), {"--train.batch"}));
  config.parallel.strategy = "ddp";  // which gathers nothing
  EXPECT_TRUE(has(advised(calm(0.2, 0, 0), config), {"--train.batch"}));
  config.train.accum = 4;
  EXPECT_TRUE(has(advised(calm(0.2, 0, 0), config), {"--train.accum_comm=last"}));
}

// A search for what fits takes away what is asked for beyond a budget, and is all that would
// change.
TEST(Advice, OfMoreAheadAsksForABudgetThatHasRoom) {
  TrainConfig config;
  config.memory_budget = "6MiB";
  EXPECT_EQ(advised(calm(0.4, 0, 0), config),
            "exposed communication is 40 % of a step: try --parallel.prefetch=2 and a larger "
            "--memory_budget (same bits, memory of one unit more)\n");
  config.parallel.prefetch = 0;
  EXPECT_TRUE(has(advised(calm(0.4, 0, 0), config),
                  {"--parallel.prefetch=1 and a larger --memory_budget (same bits"}));
  config.parallel.strategy = "ddp";
  config.parallel.reductions_in_flight = 0;
  EXPECT_TRUE(has(advised(calm(0.4, 0, 0), config),
                  {"--parallel.reductions_in_flight=1 and a larger --memory_budget (same bits"}));
}

// The advice deals the samples of a step to as many ranks as there are cores.
TEST(Advice, OfTooManyRanksSaysWhichKeepTheSamples) {
  TrainConfig config;
  const auto advised_to = [&](int num_ranks, int num_cores) {
    return advised(calm(0.2, 0, 0), config,
                   {.num_ranks = num_ranks, .num_gpus = 0, .num_cores = num_cores});
  };
  EXPECT_EQ(advised_to(4, 2),
            "exposed communication is 20 % of a step: 4 ranks share 2 cores, so some always wait; "
            "try --parallel.ranks=2 --train.accum=2 (same bits)\n");
  config.train.accum = 4;
  EXPECT_TRUE(has(advised_to(4, 2), {"--parallel.ranks=2 --train.accum=8 (same bits)"}));
  EXPECT_TRUE(
      has(advised_to(6, 5), {"6 ranks share 5 cores", "--parallel.ranks=3 --train.accum=8"}));
  EXPECT_TRUE(has(advised_to(3, 2), {"--parallel.ranks=1 --train.accum=12 (same bits)"}));
  config.train.accum_comm = AccumComm::kLast;
  EXPECT_TRUE(has(advised_to(4, 2), {"--train.accum=8 (same samples a step)"}));
  config.train.accum_comm = AccumComm::kEvery;
  config.comm.hook = "bf16";
  EXPECT_TRUE(has(advised_to(4, 2), {"--train.accum=8 (same samples a step)"}));
  config.cpu.threads_per_rank = 4;
  EXPECT_TRUE(
      has(advised_to(2, 4), {"2 ranks of 4 threads share 4 cores", "--cpu.threads_per_rank=2"}));
  EXPECT_TRUE(
      has(advised_to(8, 4), {"8 ranks of 4 threads share 4 cores", "--cpu.threads_per_rank=1"}));
}

// Exposed communication and steps that vary have one cause then, and one remedy.
TEST(Advice, OfTooManyRanksIsGivenOnce) {
  const RunPlace place{.num_ranks = 4, .num_gpus = 0, .num_cores = 2};
  const std::string remedy =
      ": 4 ranks share 2 cores, so some always wait; try --parallel.ranks=2 --train.accum=2 (same "
      "bits)\n";
  RunSummary::Figures f = calm(0.85, 0, 0);
  f.step_ms = {.median = 20, .p10 = 10, .p90 = 35};
  EXPECT_EQ(advised(f, {}, place),
            "exposed communication is 85 % of a step, and steps vary by a factor of 3.5" + remedy);
  f.parts = calm(0.05, 0.3, 0.1).parts;
  const std::string rest = advised(f, {}, place);
  EXPECT_TRUE(rest.starts_with("steps vary by a factor of 3.5" + remedy)) << rest;
  EXPECT_TRUE(has(rest, {"\nwaiting for data takes 10 %", "\nthe optimizer takes 30 %"}));
  // With a core for each they have two.
  f.parts = calm(0.85, 0, 0).parts;
  EXPECT_TRUE(has(advised(f), {"85 % of a step: try --parallel.prefetch=2",
                               "\nsteps vary by a factor of 3.5: try --cpu.pin=true"}));
}

TEST(Advice, OfProcessesCountsThoseThatShareCores) {
  const auto advised_to = [&](int num_sharing, int num_processes = 8) {
    return advised(calm(0.2, 0, 0), {},
                   {.num_ranks = 8,
                    .num_gpus = 0,
                    .num_cores = 2,
                    .num_sharing = num_sharing,
                    .num_processes = num_processes});
  };
  EXPECT_EQ(advised_to(4),  // on each of two hosts
            "exposed communication is 20 % of a step: 4 ranks share 2 cores, so some always wait; "
            "try 4 processes with --train.accum=2 (same bits)\n");
  EXPECT_TRUE(has(advised_to(8), {"8 ranks share 2 cores", "try 2 processes with"}));
  EXPECT_TRUE(has(advised_to(1), {"try --parallel.prefetch=2"}));
  // Of two processes with four threads each, or of four with two.
  EXPECT_TRUE(has(advised_to(4, 2), {"try --parallel.threads=2 --train.accum=2 (same bits)"}));
  EXPECT_TRUE(has(advised_to(8, 4), {"try 2 processes with --parallel.threads=1 --train.accum=4"}));
}

TEST(Advice, NamesTheLoaderTheOptimizerAndTheMachine) {
  EXPECT_TRUE(has(advised(calm(0, 0.25, 0.1)), {"data takes 10 %", "optimizer takes 25 %"}));
  // What stands out begins above 5 %, 10 % and 20 %, and steps that vary by half.
  EXPECT_EQ(advised(calm(0.1, 0.2, 0.05)), "");
  EXPECT_TRUE(has(advised(calm(0.101, 0.201, 0.051)),
                  {"communication is 10 %", "data takes 5 %", "optimizer takes 20 %"}));
  RunSummary::Figures wide = calm(0, 0, 0);
  wide.step_ms.p90 = 19;
  EXPECT_EQ(advised(wide),
            "steps vary by a factor of 2.0: try --cpu.pin=true (cores of its own for each rank)\n");
  EXPECT_EQ(advised(wide, {}, {.num_ranks = 4, .num_gpus = 0, .num_cores = 2}),
            "steps vary by a factor of 2.0: 4 ranks share 2 cores, so some always wait; try "
            "--parallel.ranks=2 --train.accum=2 (same bits)\n");
  TrainConfig pinned;
  pinned.cpu.pin = true;
  EXPECT_EQ(advised(wide, pinned),
            "steps vary by a factor of 2.0: other programs use the cores of this machine\n");
  EXPECT_EQ(advised(wide, {}, {.num_ranks = 2, .num_gpus = 2, .num_cores = 2}), "");
  wide.step_ms = {.median = 14, .p10 = 10, .p90 = 16};
  EXPECT_TRUE(has(advised(wide), {"factor of 1.6"}));
  wide.step_ms = {.median = 14, .p10 = 10, .p90 = 15};
  EXPECT_EQ(advised(wide), "");
  RunSummary::Figures fewest = calm(0.5, 0, 0);
  fewest.num_steps = 5;
  EXPECT_TRUE(has(advised(fewest), {"50 %"}));
}

}  // namespace
}  // namespace tessera::tools

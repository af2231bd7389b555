// What parts of the benchmark report, on a model so small that its times say nothing.
#include "tools/bench/parts.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/stream.h"
#include "tests/testing/errors.h"
#include "tests/testing/failing_new.h"
#include "tests/testing/temp_folder.h"
#include "tools/bench/training/launches.h"
#include "tools/cli/flags.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::TempFolder;

const TrainingRow kTiny{.model = bench_model(3, 2, 64, 16, 64), .batch = 1, .ranks = 2};

// The records that `part` writes, each of `fields` and no others, whose times fit together.
template <class Part>
std::vector<json> records_of(const Part& part, const std::set<std::string>& fields) {
  const TempFolder folder;
  {
    BenchConfig config;
    config.rounds = 1;
    config.steps = 2;
    BenchReport report(folder / "lines");
    part(kTiny, config, report);
  }
  std::vector<json> records;
  std::istringstream lines(folder.read("lines"));
  for (std::string line; std::getline(lines, line);) {
    const json& record = records.emplace_back(testing::parse_json(line));
    std::set<std::string> names;
    for (const auto& [name, value] : record.items()) {
      names.insert(name);
      EXPECT_TRUE(!value.is_null() || name == "loss_then") << record;
    }
    EXPECT_EQ(names, fields);
    if (fields.contains("min_ms")) {
      EXPECT_LE(record.at("min_ms"), record.at("ms"));
      EXPECT_LE(record.at("ms"), record.at("max_ms"));
    }
  }
  return records;
}

std::vector<double> column(const std::vector<json>& records, const char* name) {
  std::vector<double> values;
  for (const json& record : records) values.push_back(record.at(name).get<double>());
  return values;
}

TEST(BenchParts, AnInputIsNoOutput) {
  const TempFolder folder;
  const std::string toml = folder.write("a.toml", "bench.parts = \"none\"\n");
  const std::string peer = folder.write("peer.py", "pass\n");
  const auto refused = [&](const std::string& input, const std::string& path) {
    std::vector<std::string> words = {"bench", "--bench.jsonl=" + path, "--" + input + "=" + path};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    FlagSet flags("bench", "");
    BenchConfig config;
    config.parts = "none";
    const std::string error = testing::error_of<engine::InvalidArgument>([&] {
      run_bench(static_cast<int>(argv.size()), argv.data(), flags, config,
                {{"none", [](const BenchConfig&, BenchReport&) {}}});
    });
    EXPECT_TRUE(testing::has(error, {"[config] expected bench.jsonl and " + input, path}));
  };
  refused("config", toml);
  refused("bench.peer", peer);
  refused("bench.python", peer);
  EXPECT_EQ(folder.read("a.toml"), "bench.parts = \"none\"\n");
  EXPECT_EQ(folder.read("peer.py"), "pass\n");
}

TEST(BenchParts, RefusesOptionsOfPartsThatAreNotRun) {
  const auto run = [](std::vector<std::string> words) {
    words.insert(words.begin(), "bench");
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    FlagSet flags("bench", "");
    BenchConfig config;
    config.parts = "trains";
    int num_runs = 0;
    const auto part = [&](const BenchConfig&, BenchReport& report) {
      ++num_runs;
      report.begin_table("part", "", {"value"});
      report.row({1});
    };
    std::string error;
    try {
      run_bench(static_cast<int>(argv.size()), argv.data(), flags, config,
                {{"trains", part, {"rounds", "steps", "python", "peer"}},
                 {"kernels", part, {"samples"}},
                 {"others", part}});
    } catch (const engine::InvalidArgument& e) {
      error = e.what();
    }
    EXPECT_EQ(num_runs == 0, !error.empty()) << error;
    return error;
  };
  EXPECT_EQ(run({"--bench.rounds=2", "--bench.steps=2"}), "");
  EXPECT_EQ(run({"--bench.parts=others,kernels", "--bench.samples=2"}), "");
  EXPECT_TRUE(testing::has(run({"--bench.samples=2"}),
                           {"bench.samples with one of the parts kernels, got it with trains"}));
  EXPECT_TRUE(
      testing::has(run({"--bench.parts=kernels,others", "--bench.python=python3"}),
                   {"bench.python with one of the parts trains, got it with kernels, others"}));
  EXPECT_TRUE(testing::has(run({"--bench.peer=p.py"}), {"bench.python with bench.peer, got none"}));
}

TEST(BenchParts, TheRowsOfTheProgramAreModels) {
  std::vector<TrainingRow> all = {prefetch_row(), offload_row(), hooks_row()};
  for (const auto& rows : {training_rows(), preset_rows(), smollm2_rows(), process_rows()}) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  for (const TrainingRow& row : all) {
    EXPECT_GT(row.model.num_parameters(), 500'000) << row.name();
  }
  EXPECT_EQ(smollm2_rows()[0].model.num_parameters(), 134'515'008);
}

TEST(BenchParts, PrefetchTakesASlotMoreForEachUnitAhead) {
  const std::vector<json> records = records_of(
      bench_prefetch, {"part", "prefetch", "gb_per_s", "link_ms", "ms", "min_ms", "max_ms",
                       "exposed_ms", "hidden_pct", "saved_pct", "peak_mib", "more_memory_pct"});
  ASSERT_EQ(records.size(), 8u);  // four ways, at two speeds
  // A rank of two sends half of each gather and each reduction, of f32. Blocks are gathered twice a
  // step, but for the last one, which is in use when backward begins, and the root: once.
  constexpr std::int64_t kBlock = 50'432, kRoot = 5'376;  // elements, padded to multiples of 128
  constexpr std::int64_t kNbytes = 2 * ((3 + 2) * kBlock + kRoot + (3 * kBlock + kRoot));
  const std::vector<double> link_ms = column(records, "link_ms"),
                            gb_per_s = column(records, "gb_per_s"),
                            peak = column(records, "peak_mib"),
                            saved = column(records, "saved_pct"),
                            more = column(records, "more_memory_pct");
  for (const std::size_t off : {0u, 4u}) {
    EXPECT_EQ(records[off].at("prefetch"), "off");
    EXPECT_EQ(saved[off], 0);
    EXPECT_EQ(more[off], 0);
    for (const std::size_t way : {1u, 2u, 3u}) {
      EXPECT_NEAR(peak[off + way] / peak[off], 1 + more[off + way] / 100, 1e-6);
    }
    for (const std::size_t way : {0u, 1u, 2u, 3u}) {
      const double nbytes = link_ms[off + way] * gb_per_s[off + way] * 1e6;
      EXPECT_GT(nbytes, kNbytes) << records[off + way];
      EXPECT_LT(nbytes, kNbytes + 100) << records[off + way] << ": the norm's few numbers";
      EXPECT_EQ(link_ms[off + way], link_ms[off]) << "whatever is gathered ahead";
    }
    // Of slots, and nothing else: reductions have as many in each.
    EXPECT_GT(peak[off + 1], peak[off]);
    EXPECT_EQ(peak[off + 2], peak[off + 1]);
    EXPECT_NEAR(peak[off + 3] - peak[off + 2], peak[off + 1] - peak[off], 1e-3);
  }
  EXPECT_NEAR(link_ms[0], 2 * link_ms[4], 1e-6 * link_ms[0]) << "twice the speed";
}

TEST(BenchParts, OffloadSavesMoreTheMoreOfItLiesOnTheHost) {
  const std::vector<json> records = records_of(
      bench_offload, {"part", "parameters", "gradients", "optimizer", "updates", "ms", "min_ms",
                      "max_ms", "slower_pct", "device_mib", "saved_pct", "host_mib"});
  ASSERT_EQ(records.size(), 12u);
  const std::vector<double> device = column(records, "device_mib"),
                            saved = column(records, "saved_pct"),
                            on_host = column(records, "host_mib");
  EXPECT_EQ(saved[0], 0);
  EXPECT_LT(on_host[0], 1e-3) << "a few numbers";
  EXPECT_EQ(column(records, "slower_pct")[0], 0);
  for (std::size_t i = 1; i < records.size(); ++i) {
    EXPECT_GT(on_host[i], 0.1) << records[i];
    EXPECT_NEAR(device[i] / device[0], 1 - saved[i] / 100, 1e-6) << records[i];
    EXPECT_EQ(records[i].at("updates"), i == 11 ? "in backward" : "after it");
  }
  EXPECT_GT(saved[10], 0);  // gradients alone need more room on their way than a tiny model has
  for (const std::size_t half : {1u, 2u, 3u}) {  // of one kind, then all of it
    EXPECT_GT(saved[half + 3], saved[half]) << records[half + 3];
  }
  for (std::size_t i = 8; i < 11; ++i) {  // of all kinds a quarter more each
    EXPECT_GT(saved[i], saved[i - 1]) << records[i];
    EXPECT_GT(on_host[i], on_host[i - 1]) << records[i];
  }
}

// Elements that stand for a model's gradient: all of it, or the P and Q of the matrices that
// PowerSGD compresses at this rank, and everything else.
std::int64_t numel_sent(const ModelConfig& model, std::int64_t rank) {
  const std::int64_t layers = model.layers, dim = model.dim;
  std::int64_t numel = layers * 13 * dim + 2 * dim;  // biases and norms
  const auto add_matrices = [&numel, rank](std::int64_t count, std::int64_t rows,
                                           std::int64_t cols) {
    const std::int64_t thin = (rows + cols) * rank, all = rows * cols;
    numel += count * (rank > 0 && 2 * thin < all ? thin : all);
  };
  add_matrices(1, model.vocab, dim);
  add_matrices(1, model.seq, dim);
  add_matrices(layers, dim, 3 * dim);
  add_matrices(layers, dim, dim);
  add_matrices(2 * layers, dim, 4 * dim);
  return numel;
}

TEST(BenchParts, HooksSendWhatTheySayAndLearn) {
  constexpr std::int64_t kNumSteps = 12;
  // Of sizes that need no padding; a vocabulary of bytes.
  const TrainingRow row{
      .model = bench_model(1, 2, 128, 16), .batch = 1, .ranks = 4, .strategy = "ddp"};
  const std::vector<json> records =
      records_of([&row](const TrainingRow&, const BenchConfig& config,
                        BenchReport& report) { bench_hooks(row, kNumSteps, config, report); },
                 {"part", "hook", "mb", "step_ms", "seconds", "loss", "steps_then", "loss_then"});
  ASSERT_EQ(records.size(), 5u);
  // An all-reduce of 4 ranks sends 3/4 of what it reads and of what it writes, which is f32.
  const auto mb_of = [&row](std::int64_t rank, std::int64_t nbytes_read) {
    return 0.75e-6 * static_cast<double>(numel_sent(row.model, rank) * (nbytes_read + 4));
  };
  const std::vector<double> expected = {mb_of(0, 4), mb_of(0, 2), mb_of(8, 4), mb_of(4, 4),
                                        mb_of(1, 4)};
  const std::vector<double> mb = column(records, "mb"), loss = column(records, "loss"),
                            steps_then = column(records, "steps_then");
  EXPECT_EQ(records[0].at("hook"), "none");
  for (std::size_t i = 0; i < records.size(); ++i) {
    EXPECT_NEAR(mb[i], expected[i], 1e-9) << records[i];
    EXPECT_TRUE(i == 0 || mb[i] < mb[i - 1]) << records[i];
    EXPECT_GT(loss[i], 0) << records[i];
    EXPECT_LT(loss[i], 5.5) << records[i] << ": log(256) is 5.55";
    EXPECT_GT(records[i].at("step_ms"), 0) << records[i];
    // How far it had come when the first was done, which may be nowhere.
    const json& loss_then = records[i].at("loss_then");
    EXPECT_LE(steps_then[i], kNumSteps) << records[i];
    EXPECT_EQ(loss_then.is_null(), steps_then[i] == 0) << records[i];
    EXPECT_EQ(loss_then == loss[i], steps_then[i] == kNumSteps) << records[i];
  }
  EXPECT_EQ(std::ranges::max(steps_then), kNumSteps) << "the first of them";
}

// Streams tell of what they ran where nothing may be thrown.
TEST(LaunchLog, MemoryThatRunsOutIsAnErrorOfWhoeverAsksForTheTimes) {
  LaunchLog log;
  const engine::Work work{.name = "a kernel whose name takes memory"};
  const std::string stream = "compute";
  log.on_launch({work, stream, 1, 3});
  ASSERT_EQ(log.kernels().size(), 1u);
  EXPECT_EQ(log.kernels()[0].total_ms(), 2e-6);
  {
    const testing::NoMemory none;
    const engine::Work other{.name = "another"};
    log.on_launch({other, stream, 3, 4});
  }
  EXPECT_THROW(log.kernels(), std::bad_alloc);
}

}  // namespace
}  // namespace tessera::tools

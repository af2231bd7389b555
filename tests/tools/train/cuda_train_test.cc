// Training on GPUs: how it is distributed changes no bit there either, and it is the training of
// the CPU up to rounding.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "engine/copy.h"
#include "engine/cuda.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/tape.h"
#include "ops/scale.h"
#include "tests/shard/collective_log.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/train/batch_loader.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;
using engine::Tensor;
using testing::CollectiveLog;
using testing::error_of;
using testing::Flags;
using testing::GptRun;
using testing::has;
using testing::Outcome;
using testing::run_gpt;
using testing::run_program;
using testing::TempFolder;

// Small: the emulated device runs it in every build.
constexpr GptConfig kModel = {
    .layers = 2, .heads = 2, .dim = 32, .seq = 16, .vocab = 67, .dropout = 0.1};
constexpr int kSteps = 10;
constexpr double kGradClip = 1.5;

/// Tokens each of which mostly predicts the next.
const TokenDataset& tokens() {
  static const TokenDataset data = [] {
    std::string bytes;
    const engine::RandomStream random{7, 0};
    std::uint32_t token = 1;
    for (std::uint64_t i = 0; i < 1000; ++i) {
      token = random.uniform(i) < 0.7f ? (token * 5 + 17) % 13 : (token * 31 + 11) % 67;
      bytes += static_cast<char>(token);
    }
    const TempFolder folder;
    return TokenDataset(
        TokenFile(folder.write("tokens.txt", bytes)),
        {.seq = kModel.seq, .vocab = kModel.vocab, .order = SampleOrder::kShuffle, .seed = 3});
  }();
  return data;
}

/// Four samples a step, however many ranks.
TrainConfig base(DeviceChoice device, std::int64_t ranks = 4) {
  TrainConfig config;
  config.device = device;
  config.parallel.ranks = ranks;
  config.parallel.backend = BackendChoice::kThreads;
  config.train.accum = 4 / ranks;
  config.train.steps = kSteps;
  config.train.batch = 1;
  config.train.warmup = 2;
  config.train.lr = 5e-3;
  config.train.grad_clip = kGradClip;
  return config;
}

struct Variant {
  const char* strategy;
  std::int64_t ranks, prefetch;
  bool recompute;
};
constexpr Variant kVariants[] = {{"zero3", 4, 1, false},
                                 {"zero3", 1, 0, true},
                                 {"zero3", 2, 2, true},
                                 {"shard_grad_op", 1, 2, false},
                                 {"shard_grad_op", 2, 1, false},
                                 {"shard_grad_op", 4, 0, true},
                                 {"ddp", 1, 1, true},
                                 {"ddp", 2, 0, false},
                                 {"ddp", 4, 2, true}};

TrainConfig configure(DeviceChoice device, const Variant& v) {
  TrainConfig config = base(device, v.ranks);
  config.parallel.strategy = v.strategy;
  config.parallel.prefetch = v.prefetch;
  config.train.recompute = v.recompute;
  return config;
}

void expect_same(const GptRun& got, const GptRun& want, const std::string& what) {
  EXPECT_EQ(got.params_sha256, want.params_sha256) << what;
  EXPECT_EQ(got.loss, want.loss) << what;
  EXPECT_EQ(got.grad_norm, want.grad_norm) << what;
}

/// Within `tolerance` of each value.
void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance,
                 const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], want[i], tolerance * want[i]) << what << " of step " << i;
  }
}

TEST(CudaTraining, DistributionChangesNoBit) {
  const GptRun cpu = run_gpt(base(DeviceChoice::kCpu), kModel, tokens());
  const GptRun want = run_gpt(base(DeviceChoice::kCuda), kModel, tokens());
  const auto clipped =
      std::ranges::count_if(want.grad_norm, [](double n) { return n > kGradClip; });
  EXPECT_TRUE(clipped > 0 && clipped < kSteps) << clipped;
  // Sums of other orders, over ten steps in which AdamW divides small gradients by their size.
  expect_near(want.loss, cpu.loss, 2e-5, "loss");
  expect_near(want.grad_norm, cpu.grad_norm, 5e-4, "norm");
  for (const Variant& v : kVariants) {
    expect_same(run_gpt(configure(DeviceChoice::kCuda, v), kModel, tokens()), want,
                fmt::format("{}, {} ranks, prefetch {}, recompute {}", v.strategy, v.ranks,
                            v.prefetch, v.recompute));
  }
}

TEST(CudaTraining, StepsThatAreGraphsHaveTheBitsOfThoseThatAreNot) {
  std::vector<TrainConfig> configs;
  for (const Variant& v : {kVariants[1], kVariants[3], kVariants[6]}) {
    configs.push_back(configure(DeviceChoice::kCuda, v));
  }
  configs[1].train.accum_comm = AccumComm::kLast;
  configs[1].train.batch = 3;  // samples that begin within a block of random words
  configs[2].precision = {DType::kBF16, DType::kF32, DType::kF32};
  configs.push_back(base(DeviceChoice::kCuda, 1));
  configs.back().train.accum = 1;
  configs.back().train.optimizer = OptimizerKind::kSgd;
  configs.back().train.lr = 0.1;
  configs.back().train.max_skips = 1;
  for (TrainConfig& config : configs) {
    config.cuda.graph = GraphChoice::kOff;
    const GptRun want = run_gpt(config, kModel, tokens());
    for (const GraphChoice graph : {GraphChoice::kOn, GraphChoice::kAuto}) {
      config.cuda.graph = graph;
      const GptRun got = run_gpt(config, kModel, tokens());
      expect_same(got, want, config.parallel.strategy);
      ASSERT_EQ(got.records.size(), want.records.size());
      for (std::size_t i = 0; i < got.records.size(); ++i) {
        EXPECT_EQ(got.records[i].at("lr"), want.records[i].at("lr"));
        EXPECT_EQ(got.records[i].at("sent_bytes"), want.records[i].at("sent_bytes"));
      }
    }
  }
}

// A loss that the host reads.
TEST(CudaTraining, AStepThatCannotBeCapturedGoesOnAsItIsUnlessAGraphIsAskedFor) {
  TrainConfig config = base(DeviceChoice::kCuda, 1);
  const GptRun want = run_gpt(config, kModel, tokens());
  double sum = 0;
  const auto read = [&](engine::Tape&, const Tensor& loss, std::int64_t) {
    sum += loss.item();
    return loss;
  };
  EXPECT_EQ(run_gpt(config, kModel, tokens(), "", nullptr, {}, read).params_sha256,
            want.params_sha256);
  EXPECT_GT(sum, 0);
  config.cuda.graph = GraphChoice::kOn;
  const std::string error =
      error_of<InvalidArgument>([&] { run_gpt(config, kModel, tokens(), "", nullptr, {}, read); });
  EXPECT_TRUE(has(error, {"[graph]"})) << error;
}

TEST(CudaTraining, Bf16OnAllWires) {
  TrainConfig config = base(DeviceChoice::kCpu, 2);
  config.precision = {DType::kBF16, DType::kBF16, DType::kBF16};
  const GptRun cpu = run_gpt(config, kModel, tokens());
  config.device = DeviceChoice::kCuda;
  const GptRun want = run_gpt(config, kModel, tokens());
  expect_near(want.loss, cpu.loss, 4e-3, "loss");
  config.parallel.strategy = "ddp";
  config.train.recompute = true;
  expect_same(run_gpt(config, kModel, tokens()), want, "ddp, recompute");
}

TEST(CudaTraining, CollectivesComeInTheOrderOfTheCpu) {
  for (const Variant& v : {kVariants[0], kVariants[2], kVariants[4], kVariants[8]}) {
    std::vector<std::string> lines[2];
    for (const bool on_gpu : {false, true}) {
      CollectiveLog log;
      TrainConfig config = configure(on_gpu ? DeviceChoice::kCuda : DeviceChoice::kCpu, v);
      config.train.steps = 3;
      run_gpt(config, kModel, tokens(), "", &log);
      lines[on_gpu] = log.take();
      // How many numbers make up a norm is the device's own business.
      std::erase_if(lines[on_gpu], [](const std::string& line) { return line.ends_with(" norm"); });
    }
    EXPECT_EQ(lines[1], lines[0]) << v.strategy << ", " << v.ranks << " ranks";
    EXPECT_GE(lines[0].size(), 9u);  // three units, three steps
  }
}

TEST(CudaTraining, NcclInTheOrderOfRanksLeavesTheBitsOfThreads) {
  int num_gpus = 0;
  if constexpr (engine::kCudaBuilt) num_gpus = engine::cuda::num_devices();
  ASSERT_GT(num_gpus, 0);
  TrainConfig config = base(DeviceChoice::kCuda, num_gpus >= 4 ? 4 : num_gpus >= 2 ? 2 : 1);
  const GptRun want = run_gpt(config, kModel, tokens());
  config.parallel.backend = BackendChoice::kNccl;
  config.parallel.canonical = true;
  for (const char* strategy : {"zero3", "ddp"}) {
    config.parallel.strategy = strategy;
    expect_same(run_gpt(config, kModel, tokens()), want, strategy);
  }
  config.parallel.canonical = false;
  const GptRun any_order = run_gpt(config, kModel, tokens());
  expect_near(any_order.loss, want.loss, 2e-5, "loss");
}

TEST(CudaTraining, ALossThatIsNotFiniteNamesItsStep) {
  for (const std::int64_t steps : {2, 5}) {  // read at the end, and after the next was launched
    TrainConfig config = base(DeviceChoice::kCuda, 2);
    config.train.steps = steps;
    config.train.lr = 1e30;
    config.train.warmup = 0;
    const std::string error = error_of<InvalidArgument>([&] { run_gpt(config, kModel, tokens()); });
    EXPECT_TRUE(has(error, {"finite", "step 2", "rank"}));
  }
}

// Infinite: of the batches that begin with these samples, four of them in a step.
testing::LossChange spoiling(const std::vector<std::int64_t>& bad) {
  return [bad](engine::Tape& tape, const Tensor& loss, std::int64_t first) {
    const bool is_bad = std::ranges::find(bad, first) != bad.end();
    return is_bad ? ops::scale(tape, loss, std::numeric_limits<float>::infinity()) : loss;
  };
}

// On the device nobody waits for the norm; what is skipped is as on the CPU.
TEST(CudaTraining, SkipsUpdatesWhoseGradientIsNotFinite) {
  struct Case {
    const char *strategy, *hook;
    AccumComm accum_comm;
    bool checks;
    const char* where;  // the end of what the log says
  };
  for (const Case& c : {Case{"zero3", "none", AccumComm::kEvery, false, ""},
                        Case{"zero3", "none", AccumComm::kEvery, true, ", rank 1, micro-step 1"},
                        Case{"ddp", "none", AccumComm::kLast, true, ", rank 1, micro-step 2"},
                        Case{"hsdp", "f16", AccumComm::kEvery, true, ", rank 1, micro-step 1"}}) {
    SCOPED_TRACE(fmt::format("{}, {}", c.strategy, c.hook));
    TrainConfig config = base(DeviceChoice::kCuda, 2);
    config.parallel.strategy = c.strategy;
    config.train.schedule = ScheduleKind::kConstant;
    config.train.accum_comm = c.accum_comm;
    config.train.check_gradients = c.checks;
    config.train.max_skips = 1;
    config.comm.hook = c.hook;
    const auto train = [&](std::int64_t steps, const std::vector<std::int64_t>& bad) {
      config.train.steps = steps;
      return run_gpt(config, kModel, tokens(), "", nullptr, {}, spoiling(bad));
    };
    // In steps 2 and 4, the first of which changes what follows, and the last nothing.
    const GptRun got = train(4, {4 + 1, 12 + 1}), want = train(3, {4 + 1});
    EXPECT_EQ(got.params_sha256, want.params_sha256);
    EXPECT_NE(got.params_sha256, train(3, {}).params_sha256);
    ASSERT_EQ(got.records.size(), 4u);
    for (std::size_t i = 0; i < got.records.size(); ++i) {
      const bool is_skipped = i % 2 == 1;
      EXPECT_EQ(got.records[i].contains("skipped"), is_skipped) << got.records[i];
      EXPECT_EQ(std::isnan(got.loss[i]), is_skipped);
      EXPECT_EQ(std::isnan(got.grad_norm[i]), is_skipped);
      if (!is_skipped) continue;
      const auto where = got.records[i].at("skipped").get<std::string>();
      EXPECT_TRUE(where.ends_with(c.where)) << where;
      EXPECT_EQ(where.find("rank") != std::string::npos, c.checks) << where;
    }
    config.device = DeviceChoice::kCpu;
    EXPECT_EQ(train(4, {4 + 1, 12 + 1}).records[1].at("skipped"), got.records[1].at("skipped"));
    config.device = DeviceChoice::kCuda;
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      train(4, {4 + 1, 8 + 1});
                    }),
                    {"at most 1 update in a row", c.where, "(step 3)"}));
  }
}

TEST(CudaTraining, ProgramsTrainAndSayWhere) {
  const TempFolder folder;
  const std::string text = folder.write("text.txt", std::string(3000, 'a') + "bc");
  const std::vector<std::pair<std::string, Flags>> programs = {
      {"tools/programs/train_transformer",
       {{"model.layers", "2"},
        {"model.heads", "2"},
        {"model.dim", "32"},
        {"model.seq", "16"},
        {"data.path", text},
        {"data.val_fraction", "0.02"},
        {"log.val_every", "4"},
        {"sample.tokens", "3"}}},
      {"tools/programs/train_mlp", {{"model.hidden", "8"}}}};
  for (const auto& [program, model] : programs) {
    std::vector<std::string> hashes;
    for (const char* strategy : {"zero3", "ddp"}) {
      Flags flags = model;
      flags.merge(Flags{{"device", "cuda"},
                        {"parallel.ranks", "2"},
                        {"parallel.backend", "threads"},
                        {"parallel.strategy", strategy},
                        {"train.steps", "10"},
                        {"train.batch", "2"},
                        {"log.every", "1"},
                        {"out", folder.path()}});
      const Outcome outcome = run_program(program, flags);
      ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_TRUE(has(outcome.out, {"device: cuda, 2 ranks on ", "step     9/10 | loss",
                                    "step    10/10 | loss", "val loss"}));
      // The second finds what the first has chosen.
      EXPECT_EQ(has(outcome.out, {"matrix products: 0 timed"}), !hashes.empty()) << outcome.out;
      EXPECT_TRUE(has(outcome.out, {"algorithms in ", "gemm_algorithms.txt"}));
      std::istringstream lines(folder.read("log.jsonl"));
      nlohmann::json last;
      int num_lines = 0;
      for (std::string line; std::getline(lines, line);) {
        last = testing::parse_json(line);
        if (last.contains("val_loss")) continue;  // of a validation
        if (++num_lines <= 10) {
          EXPECT_EQ(last.at("step"), num_lines);
        }
      }
      EXPECT_EQ(num_lines, 11);
      EXPECT_EQ(last.at("final").at("device"), "cuda");
      EXPECT_TRUE(std::isfinite(last.at("final").at("val_loss").get<double>()));
      hashes.push_back(last.at("final").at("params_sha256"));
    }
    EXPECT_EQ(hashes[0], hashes[1]) << program;
  }
}

class CudaGraphProgram : public ::testing::Test {
 protected:
  Outcome train(const std::string& out, const Flags& more) const {
    Flags flags{{"device", "cuda"},
                {"parallel.ranks", "1"},
                {"model.layers", "2"},
                {"model.heads", "2"},
                {"model.dim", "32"},
                {"model.seq", "16"},
                {"model.dropout", "0.1"},
                {"data.path", text_},
                {"data.val_fraction", "0.02"},
                {"train.steps", "9"},
                {"train.batch", "2"},
                {"train.accum", "2"},
                {"log.every", "1"},
                {"cuda.gemm_algorithms", folder_ / "gemm_algorithms.txt"},
                {"out", folder_ / out}};
    for (const auto& [name, value] : more) flags[name] = value;
    if (flags["device"] == "cpu") flags.erase("cuda.gemm_algorithms");
    return run_program("tools/programs/train_transformer", flags);
  }
  std::string hash_of(const std::string& out) const {
    std::istringstream lines(folder_.read(out + "/log.jsonl"));
    std::string last;
    for (std::string line; std::getline(lines, line);) last = line;
    return testing::parse_json(last).at("final").at("params_sha256");
  }
  const TempFolder folder_;
  const std::string text_ = folder_.write("text.txt", std::string(3000, 'a') + "bc");
};

TEST_F(CudaGraphProgram, StepsAreAsPlannedWhateverComesBetween) {
  const std::string line = "cuda graph: one launch a step, after the first 2";
  for (const char* strategy : {"zero3", "ddp"}) {
    const std::string name = strategy;
    Flags flags{{"parallel.strategy", strategy}, {"cuda.graph", "off"}};
    const Outcome without = train(name + "_off", flags);
    ASSERT_EQ(without.exit_code, 0) << without.err;
    EXPECT_FALSE(has(without.out, {"cuda graph"}));
    flags["cuda.graph"] = "on";
    flags["audit"] = "true";
    const Outcome audited = train(name + "_audited", flags);
    ASSERT_EQ(audited.exit_code, 0) << audited.out << audited.err;
    EXPECT_TRUE(has(audited.out, {line, "9 steps are as planned"})) << audited.out;
    EXPECT_EQ(hash_of(name + "_audited"), hash_of(name + "_off")) << strategy;
    flags["checkpoint.every"] = "3";
    flags["cuda.graph"] = name == "ddp" ? "off" : "on";
    const Outcome saved = train(name + "_saved", flags);
    ASSERT_EQ(saved.exit_code, 0) << saved.out << saved.err;
    EXPECT_TRUE(has(saved.out, {"9 steps are as planned"})) << saved.out;
    flags["cuda.graph"] = "on";
    flags["audit"] = "false";
    flags["log.val_every"] = "4";
    const Outcome with = train(name + "_on", flags);
    ASSERT_EQ(with.exit_code, 0) << with.out << with.err;
    EXPECT_EQ(hash_of(name + "_on"), hash_of(name + "_off")) << strategy;
    // Goes on from the checkpoint of step 6, so that steps 7 and 8 are none.
    flags["resume"] = folder_ / (name + "_on/checkpoints/step_6");
    const Outcome resumed = train(name + "_resumed", flags);
    ASSERT_EQ(resumed.exit_code, 0) << resumed.out << resumed.err;
    EXPECT_EQ(hash_of(name + "_resumed"), hash_of(name + "_off")) << strategy;
  }
}

TEST_F(CudaGraphProgram, IsRefusedWhereTheHostTakesPart) {
  const std::vector<std::pair<Flags, std::string>> cases = {
      {{{"device", "cpu"}}, "the device is the CPU"},
      {{{"parallel.ranks", "2"}}, "several ranks"},
      {{{"offload.optimizer", "1"}}, "offloaded"},
      {{{"comm.hook", "bf16"}}, "comm.hook"},
      {{{"train.overlap_optimizer", "backward"}, {"train.grad_clip", "0"}},
       "train.overlap_optimizer"},
      {{{"train.verify_every", "4"}}, "train.verify_every"},
      {{{"train.check_gradients", "true"}}, "train.check_gradients"},
      {{{"log.trace", folder_ / "trace"}}, "log.trace"},
      {{{"log.probe", folder_ / "probe"}}, "log.probe"},
      {{{"memory_budget", "1GiB"}}, "memory_budget"},
  };
  for (auto [flags, what] : cases) {
    flags["cuda.graph"] = "on";
    const Outcome refused = train("refused", flags);
    EXPECT_EQ(refused.exit_code, 1) << what;
    EXPECT_TRUE(has(refused.err, {"cuda.graph=on", what})) << refused.err;
  }
  const Outcome automatic = train("auto", {{"train.check_gradients", "true"}});
  EXPECT_EQ(automatic.exit_code, 0) << automatic.err;
  EXPECT_TRUE(has(automatic.out, {"cuda graph: none, as train.check_gradients"})) << automatic.out;
}

TEST_F(CudaGraphProgram, AttentionIsComputedByWhatIsAskedFor) {
  Flags flags{{"model.dim", "128"}, {"model.heads", "2"},        {"model.seq", "140"},
              {"train.steps", "4"}, {"precision.param", "bf16"}, {"audit", "true"}};
  flags["cuda.attention"] = "mma";
  const Outcome mma = train("mma", flags);
  ASSERT_EQ(mma.exit_code, 0) << mma.out << mma.err;
  flags["cuda.attention"] = "wgmma";
  const Outcome wgmma = train("wgmma", flags);
  if (wgmma.exit_code == 0) {
    EXPECT_TRUE(has(wgmma.out, {"4 steps are as planned"})) << wgmma.out;
    EXPECT_NE(hash_of("wgmma"), hash_of("mma"));
  } else {  // another GPU
    EXPECT_TRUE(has(wgmma.err, {"compute capability 9.x for wgmma"})) << wgmma.err;
  }
  flags["device"] = "cpu";
  const Outcome cpu = train("cpu", flags);
  EXPECT_EQ(cpu.exit_code, 1);
  EXPECT_TRUE(has(cpu.err, {"expected cuda.attention=wgmma on GPUs only"})) << cpu.err;
}

TEST(CudaTraining, AlgorithmsOfProductsAreThoseOfTheFile) {
  const TempFolder folder;
  const auto train = [&](const std::string& out, Flags more) {
    Flags flags{{"device", "cuda"},   {"parallel.ranks", "1"}, {"model.hidden", "8"},
                {"train.steps", "1"}, {"train.batch", "2"},    {"out", folder / out}};
    for (const auto& [name, value] : more) flags[name] = value;
    return run_program("tools/programs/train_mlp", flags);
  };
  const auto products = [](const std::string& text) { return std::ranges::count(text, '\n') - 1; };
  const Outcome first = train("a", {});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const std::string chosen = folder.read("a/gemm_algorithms.txt");
  EXPECT_GT(products(chosen), 2);
  EXPECT_TRUE(has(first.out, {fmt::format("matrix products: {} timed", products(chosen))}));
  // Not timed, not kept.
  EXPECT_EQ(train("b", {{"cuda.tune_gemm", "false"}}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder / "b/gemm_algorithms.txt"));
  // Of another run; another shape is added.
  const std::string file = folder.write("kept.txt", chosen);
  EXPECT_TRUE(has(train("c", {{"cuda.gemm_algorithms", file}}).out,
                  {"matrix products: 0 timed", "kept.txt"}));
  EXPECT_EQ(folder.read("kept.txt"), chosen);
  EXPECT_EQ(train("d", {{"cuda.gemm_algorithms", file}, {"train.batch", "3"}}).exit_code, 0);
  EXPECT_GT(products(folder.read("kept.txt")), products(chosen));
  EXPECT_FALSE(std::filesystem::exists(folder / "d/gemm_algorithms.txt"));
  // A file that is not one, or is missing where nothing may be timed.
  const std::string other = folder.write("other.txt", "something\n");
  const Outcome refused = train("e", {{"cuda.gemm_algorithms", other}});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(has(refused.err, {"[gemm_algorithms]", "other.txt", "line 1"})) << refused.err;
  EXPECT_EQ(folder.read("other.txt"), "something\n");
  const Outcome missing =
      train("f", {{"cuda.gemm_algorithms", folder / "none"}, {"cuda.tune_gemm", "false"}});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_TRUE(has(missing.err, {"none"})) << missing.err;
}

TEST(CudaBatchLoader, BatchesAreOnTheDeviceWhileTheyAreUsed) {
  const Stream compute = Stream::cuda("compute", 0);
  const Memory memory(compute);
  constexpr std::int64_t kNumel = 5000, kNumBatches = 24;
  const Tensor sums = Tensor::zeros(memory, {kNumBatches, kNumel}, DType::kF32, "sums");
  BatchLoader loader(memory, compute, {{"x", {kNumel}, DType::kF32}}, kNumBatches,
                     [](std::int64_t n, const Batch& host) {
                       std::ranges::fill(host[0].span<float>(), static_cast<float>(n));
                     });
  for (std::int64_t n = 0; n < kNumBatches; ++n) {
    // Now the GPU waits for the batch, and now the batch for the GPU.
    if (n % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    const Tensor& x = loader.next()[0];
    EXPECT_TRUE(x.device().is_cuda());
    for (int use = 0; use < 3; ++use) {  // the last use is late
      engine::launch_assign_or_add(compute, sums.slice(n * kNumel, {kNumel}), x, true, "use");
    }
  }
  const std::vector<float> got = engine::to_vector<float>(sums);
  for (std::int64_t i = 0; i < kNumBatches * kNumel; ++i) {
    const std::int64_t batch = i / kNumel;
    ASSERT_EQ(got[static_cast<std::size_t>(i)], 3 * static_cast<float>(batch)) << i;
  }
}

}  // namespace
}  // namespace tessera::tools

// The arithmetic of the training loop, on a model that is computed by hand: the loss of a
// micro-batch is w times the sum of its samples, so its gradient is that sum.
#include "tools/train/trainer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/io/file.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/train/linear_training.h"
#include "tools/cli/stop.h"
#include "tools/data/token_dataset.h"
#include "tools/io/sha256.h"

namespace tessera::tools {
namespace {

using comm::ProcessGroup;
using engine::Block;
using engine::Init;
using engine::InvalidArgument;
using engine::Parameter;
using testing::error_of;
using testing::has;
using testing::TempFolder;

/// Ranks x accumulation: one process, both, and numbers that share no divisor.
const std::vector<std::pair<std::int64_t, std::int64_t>> kRanksAccum = {
    {1, 1}, {1, 6}, {2, 3}, {3, 2}, {6, 1}};

TEST(MeanLoss, CountsEveryBatchOnceWhateverTheNumberOfRanks) {
  // Powers of two: a batch that counts twice, or not at all, shows whichever it is.
  const std::vector<double> expected = {1.0,      3.0 / 2,  7.0 / 3,  15.0 / 4,
                                        31.0 / 5, 63.0 / 6, 127.0 / 7};
  for (const std::int64_t ranks : {1, 2, 3, 4, 5}) {
    for (std::int64_t num_batches = 1; num_batches <= 7; ++num_batches) {
      run_ranks(config_of(ranks, 1, 0), [&](const LinearRank& rank) {
        std::set<std::int64_t> mine;
        std::int64_t num_calls = 0;
        const double loss = rank.trainer.mean_loss(num_batches, [&](std::int64_t batch) {
          EXPECT_FALSE(rank.trainer.tape().recording());
          mine.insert(batch);
          ++num_calls;
          return scalar(rank, std::ldexp(1.0f, static_cast<int>(batch)));
        });
        EXPECT_EQ(loss, expected[static_cast<std::size_t>(num_batches - 1)])
            << num_batches << " batches on " << ranks << " ranks";
        // Forwards gather, so every rank runs as many.
        EXPECT_EQ(num_calls, (num_batches + ranks - 1) / ranks);
        for (std::int64_t b = rank.world.rank(); b < num_batches; b += ranks) {
          EXPECT_TRUE(mine.contains(b)) << b;
        }
      });
    }
  }
}

TEST(MeanLoss, HasTheSameBitsWhateverTheNumberOfRanks) {
  // Large and small in turn, so that another order of the sum would round otherwise.
  const auto value = [](std::int64_t b) { return b % 2 == 0 ? 0.1f + float(b) : 1e17f / float(b); };
  double sum = 0;
  for (std::int64_t b = 0; b < 7; ++b) sum += value(b);
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    run_ranks(config_of(ranks, 1, 0), [&](const LinearRank& rank) {
      EXPECT_EQ(rank.trainer.mean_loss(7, [&](std::int64_t b) { return scalar(rank, value(b)); }),
                sum / 7)
          << ranks;
    });
  }
}

TEST(Trainer, LogsTheMeanOverMicroStepsAndRanks) {
  for (const auto& [ranks, accum] : kRanksAccum) {
    TrainConfig config = config_of(ranks, accum, 4);
    config.train.batch = 2;
    const auto lines = run_ranks(config, [](const LinearRank& rank) { rank.run(nullptr, 5); });
    ASSERT_EQ(lines.size(), 4u);
    const std::int64_t micros = ranks * accum;
    double w = 1;
    for (std::int64_t step = 0; step < 4; ++step) {
      const auto& line = lines[static_cast<std::size_t>(step)];
      SCOPED_TRACE(::testing::Message() << ranks << " x " << accum << ", step " << step);
      const double mean = sum_of_samples(step * micros * 2, micros * 2) / double(micros);
      ASSERT_NE(mean, 0);
      EXPECT_EQ(line.at("step"), step + 1);
      EXPECT_NEAR(line.at("loss").get<double>(), w * mean, 1e-5);
      EXPECT_NEAR(line.at("grad_norm").get<double>(), std::abs(mean), 1e-5);
      EXPECT_EQ(line.at("lr"), 0.125);
      // Two samples a micro-batch, of five tokens each, on all ranks, in all micro-steps.
      const double tokens =
          line.at("tokens_per_s").get<double>() * line.at("step_ms").get<double>() * 1e-3;
      EXPECT_NEAR(tokens, double(micros) * 2 * 5, 1e-6);
      w -= 0.125 * mean;
    }
  }
}

TEST(Trainer, UpdatesWithTheRateThatItLogs) {
  for (const auto schedule : {ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    TrainConfig config = config_of(2, 1, 6);
    config.train.schedule = schedule;
    config.train.warmup = 2;
    const auto lines = run_ranks(config, [](const LinearRank& rank) { rank.run(); });
    ASSERT_EQ(lines.size(), 6u);
    double w = 1;
    for (std::int64_t step = 0; step < 6; ++step) {
      const auto& line = lines[static_cast<std::size_t>(step)];
      const double mean = sum_of_samples(step * 2, 2) / 2;
      ASSERT_NE(mean, 0);
      EXPECT_EQ(line.at("lr"), config.train.lr_at(step)) << step;
      EXPECT_NEAR(line.at("loss").get<double>(), w * mean, 1e-5) << step;
      w -= config.train.lr_at(step) * mean;
    }
  }
}

TEST(Trainer, LogsTheNormBeforeClippingAndUpdatesWithTheClippedGradient) {
  TrainConfig config = config_of(2, 3, 5);
  config.train.grad_clip = 0.75;
  config.train.momentum = 0.5;
  const auto lines = run_ranks(config, [](const LinearRank& rank) { rank.run(); });
  double w = 1, velocity = 0;
  int num_clipped = 0;
  for (std::int64_t step = 0; step < 5; ++step) {
    const auto& line = lines[static_cast<std::size_t>(step)];
    const double mean = sum_of_samples(step * 6, 6) / 6;
    EXPECT_NEAR(line.at("grad_norm").get<double>(), std::abs(mean), 1e-5) << step;
    EXPECT_NEAR(line.at("loss").get<double>(), w * mean, 1e-5) << step;
    num_clipped += std::abs(mean) > 0.75;
    velocity = 0.5 * velocity + std::clamp(mean, -0.75, 0.75);
    w -= 0.125 * velocity;
  }
  EXPECT_TRUE(num_clipped > 0 && num_clipped < 5) << num_clipped;
}

TEST(Trainer, UpdatesAsAdamWWithItsOwnHyperparameters) {
  TrainConfig config = config_of(2, 3, 5);
  config.train.optimizer = OptimizerKind::kAdamW;
  config.train.beta1 = 0.75;
  config.train.beta2 = 0.5;
  config.train.eps = 0.375;
  config.train.weight_decay = 0.875;
  const auto lines = run_ranks(config, [](const LinearRank& rank) { rank.run(); });
  double w = 1, m = 0, v = 0;
  for (std::int64_t step = 0; step < 5; ++step) {
    const double mean = sum_of_samples(step * 6, 6) / 6;
    EXPECT_NEAR(lines[static_cast<std::size_t>(step)].at("loss").get<double>(), w * mean, 1e-5)
        << step;
    const double t = static_cast<double>(step) + 1;
    m = 0.75 * m + 0.25 * mean;
    v = 0.5 * v + 0.5 * mean * mean;
    const double root = std::sqrt(v / (1 - std::pow(0.5, t))) + 0.375;
    w = w * (1 - 0.125 * 0.875) - 0.125 * m / (1 - std::pow(0.75, t)) / root;
  }
}

TEST(Trainer, DealsSamplesInOrderOverMicroStepsAndRanks) {
  for (const auto& [ranks, accum] : kRanksAccum) {
    TrainConfig config = config_of(ranks, accum, 3);
    config.train.batch = 4;
    std::mutex mutex;
    std::vector<std::int64_t> filled, used;
    run_ranks(config, [&](const LinearRank& rank) {
      std::vector<std::int64_t> mine;
      Trainer::Data data = rank.data();
      data.fill = [&, fill = data.fill](std::int64_t first, const Batch& host) {
        fill(first, host);
        const std::lock_guard lock(mutex);
        filled.push_back(first);
      };
      rank.trainer.run(
          data,
          [&](std::int64_t first, const Batch& batch) {
            // The batch is the one that the number says.
            EXPECT_EQ(batch[0].item(), static_cast<float>(sum_of_samples(first, 4)));
            mine.push_back(first);
            return rank.loss(batch);
          },
          nullptr, 1);
      for (std::int64_t micro = 0; micro < std::ssize(mine); ++micro) {
        EXPECT_EQ(mine[static_cast<std::size_t>(micro)],
                  (micro * rank.world.size() + rank.world.rank()) * 4);
      }
      const std::lock_guard lock(mutex);
      used.insert(used.end(), mine.begin(), mine.end());
    });
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 0; i < 3 * ranks * accum; ++i) expected.push_back(i * 4);
    std::ranges::sort(filled);
    std::ranges::sort(used);
    EXPECT_EQ(filled, expected) << ranks << " x " << accum;
    EXPECT_EQ(used, expected) << ranks << " x " << accum;
  }
}

TEST(Trainer, ShowsEverySequenceOnceAnEpochAndShufflesTheNextAgain) {
  const TempFolder folder;
  std::string text;
  for (char c = 0; c < 25; ++c) text += c;
  const TokenDataset dataset(TokenFile(folder.write("a.txt", text)),
                             {.seq = 2, .order = SampleOrder::kShuffle, .seed = 5});
  ASSERT_EQ(dataset.num_sequences(), 12);
  std::vector<std::vector<int>> orders;
  for (const auto& [ranks, accum] : kRanksAccum) {
    // Three epochs of 12 sequences, two to a micro-batch.
    TrainConfig config = config_of(ranks, accum, 18 / (ranks * accum));
    config.train.batch = 2;
    std::mutex mutex;
    std::vector<int> order(36, -1);
    run_ranks(config, [&](const LinearRank& rank) {
      Trainer::Data data = rank.data();
      data.fill = [&](std::int64_t first, const Batch& host) {
        host[0].data<float>()[0] = 1;
        std::vector<std::int32_t> tokens(4), targets(4);
        dataset.batch(first, 2, tokens, targets);
        const std::lock_guard lock(mutex);
        order.at(static_cast<std::size_t>(first)) = tokens[0] / 2;
        order.at(static_cast<std::size_t>(first) + 1) = tokens[2] / 2;
      };
      rank.trainer.run(
          data, [&](std::int64_t, const Batch& batch) { return rank.loss(batch); }, nullptr, 1);
    });
    orders.push_back(order);
  }
  for (const auto& order : orders) EXPECT_EQ(order, orders[0]);
  std::set<std::vector<int>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    const std::vector<int> shown(orders[0].begin() + epoch * 12,
                                 orders[0].begin() + (epoch + 1) * 12);
    EXPECT_EQ(std::set(shown.begin(), shown.end()).size(), 12u) << "epoch " << epoch;
    epochs.insert(shown);
  }
  EXPECT_EQ(epochs.size(), 3u);
}

/// Steps after which a run validates, as it says on the terminal ("4: 2.5000 (extra)") and as the
/// model had been trained by then.
struct Validations {
  std::vector<std::string> printed;
  std::vector<std::int64_t> steps_done;
  std::optional<double> last;
};

Validations validations_of(std::int64_t steps, std::int64_t every) {
  TrainConfig config = config_of(2, 3, steps);
  config.log.val_every = every;
  Validations result;
  const auto train = [&](const LinearRank& rank) {
    std::int64_t num_losses = 0;
    const auto validate = [&] {
      const std::int64_t done = num_losses / 3;
      if (rank.world.rank() == 0) result.steps_done.push_back(done);
      return Trainer::Validation{0.5 * static_cast<double>(done), " (extra)"};
    };
    rank.trainer.run(
        rank.data(),
        [&](std::int64_t, const Batch& batch) {
          ++num_losses;
          return rank.loss(batch);
        },
        validate, 1);
    if (rank.world.rank() == 0) result.last = rank.trainer.validation()->loss;
  };
  const std::string out = stdout_of([&] { run_ranks(config, train); });
  const std::regex line(R"(step +(\d+)/(\d+) \| val loss ([^\n]*))");
  for (std::sregex_iterator i(out.begin(), out.end(), line), end; i != end; ++i) {
    EXPECT_EQ((*i)[2], std::to_string(steps));
    result.printed.push_back((*i)[1].str() + ": " + (*i)[3].str());
  }
  return result;
}

TEST(Trainer, ValidatesAsOftenAsAskedAndOnceAtTheEnd) {
  using Steps = std::vector<std::int64_t>;
  const struct {
    std::int64_t steps, every;
    Steps expected;
  } cases[] = {
      {6, 0, {6}},                 // at the end only
      {6, 1, {1, 2, 3, 4, 5, 6}},  // after each step, and after the last one once
      {6, 2, {2, 4, 6}},
      {6, 3, {3, 6}},
      {7, 2, {2, 4, 6, 7}},  // steps that it does not divide
      {7, 5, {5, 7}},
      {6, 6, {6}},
      {6, 7, {6}},
      {1, 1, {1}},
      {0, 3, {0}},
  };
  for (const auto& [steps, every, expected] : cases) {
    SCOPED_TRACE(::testing::Message() << steps << " steps, every " << every);
    const Validations got = validations_of(steps, every);
    std::vector<std::string> lines;
    for (const std::int64_t step : expected) {
      lines.push_back(fmt::format("{}: {:.4f} (extra)", step, 0.5 * static_cast<double>(step)));
    }
    EXPECT_EQ(got.printed, lines);
    EXPECT_EQ(got.steps_done, expected);
    EXPECT_EQ(got.last, 0.5 * static_cast<double>(steps));
  }
}

TEST(Trainer, AllRanksEndAfterTheStepInWhichOneIsAskedTo) {
  for (const int asked : {0, 1, 2}) {
    const StopSignals signals;
    TrainConfig config = config_of(3, 2, 9);
    config.log.val_every = 1;
    std::atomic<int> num_there = 0;
    const auto train = [&](const LinearRank& rank) {
      int num_losses = 0, num_validations = 0;
      const auto validate = [&] {
        // Between two steps, once all the others are in the next and were not asked.
        if (++num_validations == 2 && rank.world.rank() == asked) {
          while (num_there < 2) std::this_thread::yield();
          request_stop(SIGTERM);
        }
        return Trainer::Validation{0, ""};
      };
      rank.trainer.run(
          rank.data(),
          [&](std::int64_t, const Batch& batch) {
            if (++num_losses == 5) ++num_there;
            return rank.loss(batch);
          },
          validate, 1);
      EXPECT_EQ(num_losses, 6) << asked;
      EXPECT_EQ(num_validations, 2) << asked;
      EXPECT_EQ(rank.trainer.stopped_by(), SIGTERM);
      EXPECT_EQ(rank.trainer.end_record().text(), R"({"steps":3,"stopped_by":"SIGTERM"})");
    };
    std::vector<nlohmann::json> lines;
    const std::string out = stdout_of([&] { lines = run_ranks(config, train); });
    EXPECT_EQ(lines.size(), 5u) << "three steps, and validations after the first two";
    EXPECT_TRUE(has(out, {"stopped by SIGTERM after step 3 of 9\n"}));
  }
  const StopSignals forgotten;
}

TEST(Trainer, ALogThatNobodyReadsHoldsUpNoStep) {
  const TempFolder folder;
  TrainConfig config = config_of(2, 1, 10);
  config.out = folder.path();
  config.log.jsonl = folder / "pipe";
  ASSERT_EQ(::mkfifo(config.log.jsonl.c_str(), 0600), 0);
  const engine::FileDescriptor reader(
      ::open(config.log.jsonl.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  RunLog log(config, std::string(1 << 20, 'x'));  // lines of 1 MiB, of which 16 may wait
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    LinearModel model;
    Trainer trainer(world, engine::Stream::inline_cpu("compute"), config, {&model.block}, nullptr,
                    world.rank() == 0 ? &log : nullptr);
    LinearRank{world, trainer, model, config}.run();
  });
  std::atomic<bool> done = false;
  std::size_t num_read = 0;
  std::jthread reading([&] {
    std::string buffer(1 << 16, '\0');
    while (!done) {
      const ssize_t n = ::read(reader.get(), buffer.data(), buffer.size());
      if (n > 0) num_read += static_cast<std::size_t>(n);
      if (n <= 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  log.flush();
  done = true;
  reading.join();
  EXPECT_GT(num_read, std::size_t{9} << 20);
}

TEST(Trainer, WithoutAValidationSaysNothingOfOne) {
  TrainConfig config = config_of(1, 1, 2);
  config.log.val_every = 1;
  const auto train = [](const LinearRank& rank) {
    rank.run();
    EXPECT_FALSE(rank.trainer.validation().has_value());
  };
  EXPECT_EQ(stdout_of([&] { run_ranks(config, train); }), "");
}

TEST(Trainer, ALossThatIsNotFiniteNamesStepMicroStepAndRank) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const std::string error = error_of<InvalidArgument>([&] {
      run_ranks(config_of(3, 4, 5), [&](const LinearRank& rank) {
        Trainer::Data data = rank.data();
        data.fill = [&](std::int64_t first, const Batch& host) {
          // Batch (3 steps x 4 + 2) x 3 ranks + 1.
          host[0].data<float>()[0] = first == 43 ? bad : 1.0f;
        };
        rank.trainer.run(
            data, [&](std::int64_t, const Batch& batch) { return rank.loss(batch); }, nullptr, 1);
      });
    });
    EXPECT_TRUE(has(error, {"a finite loss", "(step 4, micro-step 3, rank 1)"}));
  }
}

// Runs `steps` steps of two micro-steps on two ranks, in which the samples `bad` are not finite.
std::vector<nlohmann::json> run_with(const std::set<std::int64_t>& bad, std::int64_t steps,
                                     std::int64_t max_skips, bool check, float* result) {
  TrainConfig config = config_of(2, 2, steps);
  config.train.momentum = 0.9;
  config.train.max_skips = max_skips;
  config.train.check_gradients = check;
  return run_ranks(config, [&](const LinearRank& rank) {
    Trainer::Data data = rank.data();
    data.fill = [&](std::int64_t first, const Batch& host) {
      host[0].data<float>()[0] =
          bad.contains(first) ? std::numeric_limits<float>::infinity() : sample(first % 4);
    };
    rank.trainer.run(
        data, [&](std::int64_t, const Batch& batch) { return rank.loss(batch); }, nullptr, 1);
    const float w = rank.trainer.fsdp().full_parameter(rank.model.w)[0];
    if (rank.world.rank() == 0) *result = w;
  });
}

// Four samples a step. Each step sees the same, so one that is skipped is as if it had not been.
TEST(Trainer, SkipsUpdatesWhoseGradientIsNotFinite) {
  float expected = 0, got = 0;
  run_with({}, 3, 0, false, &expected);
  for (const bool check : {false, true}) {
    const auto lines = run_with({4 + 3, 12 + 0}, 5, 1, check, &got);  // of steps 2 and 4
    EXPECT_EQ(got, expected);
    ASSERT_EQ(lines.size(), 5u);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const bool is_skipped = i == 1 || i == 3;
      EXPECT_EQ(lines[i].contains("skipped"), is_skipped) << lines[i];
      EXPECT_EQ(lines[i].at("grad_norm").is_null(), is_skipped) << lines[i];
      EXPECT_EQ(lines[i].at("loss").is_null(), is_skipped) << lines[i];
    }
    EXPECT_EQ(lines[1].at("skipped"), check ? "w, rank 1, micro-step 2" : "w");
    EXPECT_EQ(lines[3].at("skipped"), check ? "w, rank 0, micro-step 1" : "w");
  }
}

TEST(Trainer, EndsAfterTooManySkippedUpdatesInARow) {
  float ignored = 0;
  run_with({0, 4, 12, 16}, 6, 2, false, &ignored);  // of steps 1 and 2, 4 and 5
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    run_with({0, 4, 8}, 6, 2, false, &ignored);
                  }),
                  {"at most 2 updates in a row", "(w)", "(step 3)"}));
}

TEST(Trainer, GathersTheValuesOfAllRanksInTheirOrder) {
  run_ranks(config_of(3, 1, 0), [](const LinearRank& rank) {
    const auto r = static_cast<float>(rank.world.rank());
    EXPECT_EQ(rank.trainer.gather({r, r + 0.5f}), (std::vector<float>{0, 0.5f, 1, 1.5f, 2, 2.5f}));
  });
}

TEST(Trainer, HashesAllParametersInTheOrderOfTheirNames) {
  // In the order of names: 7 threes of "a", 2 ones of "b", a zero of "c", whichever block has them.
  const std::vector<float> values = {3, 3, 3, 3, 3, 3, 3, 1, 1, 0};
  Sha256 expected;
  expected.update(std::as_bytes(std::span(values)));
  for (const int ranks : {1, 2, 3}) {
    TrainConfig config = config_of(ranks, 1, 0);
    comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
      Parameter a{.name = "a", .shape = {7}}, b{.name = "b", .shape = {2}, .init = Init::ones()};
      Parameter c{.name = "c", .shape = {1}};
      Block first{"first", {&c, &a}}, second{"second", {&b}};
      Trainer trainer(world, engine::Stream::inline_cpu("compute"), config, {&first, &second},
                      nullptr, nullptr);
      trainer.fsdp().load(a, std::vector<float>(7, 3.0f));
      trainer.fsdp().parameters_changed();
      EXPECT_EQ(trainer.params_sha256(), expected.hex()) << ranks;
    });
  }
}

TEST(LargestDivisor, LeavesNoRemainder) {
  EXPECT_EQ(largest_divisor(12, 5), 4);
  EXPECT_EQ(largest_divisor(12, 6), 6);
  EXPECT_EQ(largest_divisor(12, 100), 12);
  EXPECT_EQ(largest_divisor(13, 12), 1);
  EXPECT_EQ(largest_divisor(1, 1), 1);
  EXPECT_EQ(largest_divisor(0, 8), 0);
}

}  // namespace
}  // namespace tessera::tools

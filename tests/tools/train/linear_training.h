// A trainer whose model is computed by hand: the loss of a micro-batch is w times the sum of its
// samples.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "ops/linear.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

/// SGD at a constant rate, and nothing on the terminal but validations.
inline TrainConfig config_of(std::int64_t ranks, std::int64_t accum, std::int64_t steps) {
  TrainConfig config;
  config.parallel.ranks = ranks;
  config.train.accum = accum;
  config.train.steps = steps;
  config.train.batch = 1;
  config.train.optimizer = OptimizerKind::kSgd;
  config.train.momentum = 0;
  config.train.schedule = ScheduleKind::kConstant;
  config.train.lr = 0.125;
  config.train.grad_clip = 0;
  config.log.every = 0;
  return config;
}

/// w starts as 1.
struct LinearModel {
  engine::Parameter w{.name = "w", .shape = {1, 1}, .init = engine::Init::ones()};
  engine::Block block{"block", {&w}};
};

/// Sample n of the training data: neighbours differ, some are negative, and no mean here is 0.
inline float sample(std::int64_t n) { return static_cast<float>((n * 7 + 3) % 11) - 4.3125f; }

inline double sum_of_samples(std::int64_t first, std::int64_t count) {
  double sum = 0;
  for (std::int64_t n = first; n < first + count; ++n) sum += sample(n);
  return sum;
}

/// A rank's trainer with all that it needs.
struct LinearRank {
  comm::ProcessGroup& world;
  Trainer& trainer;
  LinearModel& model;
  const TrainConfig& config;

  Trainer::Data data() const {
    const auto fill = [batch = config.train.batch](std::int64_t first, const Batch& host) {
      host[0].data<float>()[0] = static_cast<float>(sum_of_samples(first, batch));
    };
    return {{{"x", {1, 1}, engine::DType::kF32}}, fill};
  }
  engine::Tensor loss(const Batch& batch) const {
    engine::Tape& tape = trainer.tape();
    return tape.region(model.block, [&] { return ops::linear(tape, batch[0], model.w, nullptr); });
  }
  void run(const Trainer::Validate& validate = nullptr, std::int64_t items_per_sample = 1) const {
    trainer.run(
        data(), [&](std::int64_t, const Batch& batch) { return loss(batch); }, validate,
        items_per_sample);
  }
};

/// fn(rank) on every rank; returns the lines of the log.
inline std::vector<nlohmann::json> run_ranks(TrainConfig config,
                                             const std::function<void(const LinearRank&)>& fn) {
  const testing::TempFolder folder;
  config.out = folder.path();
  RunLog log(config, "tokens");
  const auto size = static_cast<int>(config.parallel.ranks);
  comm::run_ranks(size, {}, [&](comm::ProcessGroup& world) {
    LinearModel model;
    Trainer trainer(world, engine::Stream::inline_cpu("compute"), config, {&model.block}, nullptr,
                    world.rank() == 0 ? &log : nullptr);
    fn({world, trainer, model, config});
  });
  log.flush();
  std::vector<nlohmann::json> lines;
  std::istringstream text(folder.read("log.jsonl"));
  for (std::string line; std::getline(text, line);) lines.push_back(testing::parse_json(line));
  return lines;
}

inline engine::Tensor scalar(const LinearRank& rank, float value) {
  return engine::Tensor::from<float>(rank.trainer.tape().memory(), {1}, std::span(&value, 1));
}

/// What the terminal shows of `fn`.
inline std::string stdout_of(const std::function<void()>& fn) {
  ::testing::internal::CaptureStdout();
  EXPECT_NO_THROW(fn());
  return ::testing::internal::GetCapturedStdout();
}

}  // namespace tessera::tools

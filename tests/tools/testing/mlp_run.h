// A training of a small perceptron in process, of which a test can change losses and weights, and
// all that it leaves.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/philox.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tools/launch/ranks.h"
#include "tools/models/mlp.h"
#include "tools/report/run_log.h"
#include "tools/train/trainer.h"

namespace tessera::testing {

/// Of 2 ranks, each with 2 micro-steps of 2 samples.
struct MlpTraining {
  tools::StepConfig step = {};
  /// What the configuration has besides `step`; a checkpoint at the end is saved anyway.
  std::function<void(tools::TrainConfig&)> change = {};
  bool resumes = false;
  tools::RunIdentity identity = {"mlp", "data", ""};
  /// The loss of a micro-batch in place of `loss`: (step from 0, rank, how often it was made).
  std::function<float(std::int64_t step, int rank, int attempt, float loss)> fault = {};
  /// What is done to a rank's model between forward and backward.
  std::function<void(std::int64_t step, int rank, int attempt, tools::Mlp& mlp)> damage = {};
  /// What a validation comes to after `num_done` steps; null: none.
  std::function<double(std::int64_t num_done)> validate = {};
  /// The clock of a rank that has made `num_done` steps in this process.
  std::function<std::chrono::minutes(std::int64_t num_done)> minutes = {};
};

struct MlpTrained {
  std::string sha, error;
  std::vector<tools::StepRecord> steps;
  std::vector<nlohmann::json> records;      ///< the log
  std::vector<std::int64_t> first_samples;  ///< of each loss that rank 0 made
  tools::TrainPosition resumed;
};

inline MlpTrained train_mlp(const TempFolder& folder, const MlpTraining& training) {
  tools::TrainConfig config;
  config.device = tools::DeviceChoice::kCpu;
  config.parallel.ranks = 2;
  config.out = folder.path();
  config.log.every = 0;
  config.train = training.step;
  config.train.batch = 2;
  config.train.accum = 2;
  config.train.lr = 1e-2;
  config.checkpoint.every = 100;
  if (training.resumes) config.checkpoint.resume = "auto";
  if (training.change) training.change(config);
  MlpTrained run;
  const auto time = [&](std::int64_t num_done) {
    using Clock = std::chrono::steady_clock;
    return training.minutes ? Clock::time_point(training.minutes(num_done)) : Clock::now();
  };
  std::int64_t num_logged = 0;
  tools::RunLog log(config, "samples", "", [&] { return time(num_logged); });
  try {
    tools::Ranks::choose(config).run(config, [&](comm::ProcessGroup& world) {
      const bool is_first = world.rank() == 0;
      tools::Mlp mlp({.inputs = 6, .hidden = 8, .layers = 2, .classes = 3});
      tools::Trainer trainer(world, engine::Stream::inline_cpu("compute"), config, mlp.blocks(),
                             mlp.root(), is_first ? &log : nullptr);
      std::int64_t num_done = 0;
      trainer.read_time_from([&] { return time(num_done); });
      const tools::TrainPosition start = trainer.open_checkpoints(training.identity);
      world.barrier("loaded");
      if (is_first) {
        log.begin(start.step);
        run.resumed = start;
      }
      trainer.on_step([&](const tools::StepRecord& record) {
        ++num_done;
        if (!is_first) return;
        run.steps.push_back(record);
        ++num_logged;
      });
      const auto fill = [](std::int64_t first, const tools::Batch& host) {
        const engine::RandomStream random{3, static_cast<std::uint64_t>(first)};
        for (std::int64_t i = 0; i < 12; ++i) {
          host[0].data<float>()[i] = random.normal(static_cast<std::uint64_t>(i));
        }
        host[1].data<std::int32_t>()[0] = static_cast<std::int32_t>(first % 3);
        host[1].data<std::int32_t>()[1] = static_cast<std::int32_t>((first + 1) % 3);
      };
      std::map<std::int64_t, int> attempts;  // of each micro-batch
      const auto loss = [&](std::int64_t first, const tools::Batch& batch) {
        if (is_first) run.first_samples.push_back(first);
        const engine::Tensor value = mlp.loss(trainer.tape(), batch, {});
        const std::int64_t step = first / 8;
        const int attempt = attempts[first]++;
        float& x = *value.data<float>();
        if (training.fault) x = training.fault(step, world.rank(), attempt, x);
        if (training.damage) training.damage(step, world.rank(), attempt, mlp);
        return value;
      };
      const auto validate = [&] {
        return tools::Trainer::Validation{training.validate(start.step + num_done), "", "",
                                          tools::JsonRecord().add("accuracy", 0.5)};
      };
      trainer.run({{{"x", {2, 6}, engine::DType::kF32}, {"y", {2}, engine::DType::kI32}}, fill},
                  loss, training.validate ? tools::Trainer::Validate(validate) : nullptr, 1);
      const std::string sha = trainer.params_sha256();
      if (!is_first) return;
      run.sha = sha;
      const auto& last = trainer.validation();
      log.finish(sha, last ? std::optional(last->loss) : std::nullopt, trainer.end_record());
    });
  } catch (const engine::Error& e) {
    run.error = e.what();
  }
  log.flush();
  std::istringstream lines(folder.read("log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    run.records.push_back(parse_json(line));
  }
  return run;
}

}  // namespace tessera::testing

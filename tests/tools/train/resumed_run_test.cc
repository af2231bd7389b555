// All that a run counts, in a run that was stopped and went on, compared with one that was not:
// steps, samples, rates of learning, validations, verified steps, skips, spikes, minutes, and the
// time that is left.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/io/event_reader.h"
#include "tests/tools/testing/mlp_run.h"
#include "tools/config/train_config.h"
#include "tools/report/run_log.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using std::chrono::minutes;
using testing::has;
using testing::MlpTrained;
using testing::MlpTraining;
using testing::TempFolder;
using testing::train_mlp;

/// A minute a step.
minutes minute_a_step(std::int64_t num_done) { return minutes(1000 + num_done); }

/// `training`, but until the clock of this process has come to `num_steps` steps, from 2 on.
MlpTraining stopped_after(MlpTraining training, std::int64_t num_steps) {
  training.step.max_minutes = static_cast<double>(num_steps) - 1.5;
  return training;
}

MlpTraining resumed(MlpTraining training) {
  training.resumes = true;
  return training;
}

/// What records say that no interruption may change, a line each.
std::vector<std::string> said(const std::vector<json>& records) {
  std::vector<std::string> lines;
  for (const json& record : records) {
    const json& from = record.contains("final") ? record.at("final") : record;
    std::string& line = lines.emplace_back();
    for (const char* key : {"step", "loss", "grad_norm", "lr", "skipped", "replayed", "val_loss",
                            "accuracy", "steps", "stopped_by", "params_sha256"}) {
      if (from.contains(key)) line += fmt::format("{}={} ", key, testing::json_text(from.at(key)));
    }
  }
  return lines;
}

using Scalars = std::map<std::pair<std::string, std::int64_t>, float>;  // by tag and step

/// As TensorBoard shows the files of a folder: a session replaces what it begins with.
Scalars scalars_of(const TempFolder& folder) {
  Scalars all;
  std::map<std::filesystem::file_time_type, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "tb")) {
    files[entry.last_write_time()] = "tb/" + entry.path().filename().string();
  }
  for (const auto& [time, file] : files) {
    for (const auto& event : testing::EventReader::read(folder.read(file))) {
      if (event.starts_session) {
        std::erase_if(all, [&](const auto& e) { return e.first.second >= event.step; });
      }
      for (const auto& [tag, value] : event.scalars) {
        if (tag.starts_with("train/") || tag.starts_with("validation/")) {
          all[{tag, event.step}] = value;
        }
      }
    }
  }
  return all;
}

/// A training of 9 steps with all that counts: a schedule, validations, steps that are verified,
/// and step 5, whose gradient is not finite.
MlpTraining counting(const TempFolder& folder) {
  MlpTraining training;
  training.step = {.steps = 9, .max_skips = 1, .verify_every = 3, .warmup = 3};
  training.change = [tb = folder / "tb"](TrainConfig& config) {
    config.log.val_every = 2;
    config.log.tensorboard = tb;
    config.checkpoint.keep = 0;
  };
  training.damage = [](std::int64_t step, int rank, int, Mlp& mlp) {
    if (step != 4 || rank != 1) return;
    const engine::Parameter& weight = *mlp.blocks().at(1)->parameters.front();
    if (!weight.value.buffer()->resident()) return;
    *weight.value.data<float>() = std::numeric_limits<float>::quiet_NaN();
  };
  training.validate = [](std::int64_t num_done) { return 0.25 * static_cast<double>(num_done); };
  training.minutes = minute_a_step;
  return training;
}

TEST(ResumedRun, SaysOfEachStepWhatAnUninterruptedRunSays) {
  const TempFolder whole_folder;
  const MlpTrained whole = train_mlp(whole_folder, counting(whole_folder));
  ASSERT_EQ(whole.error, "");
  const std::vector<std::string> expected = said(whole.records);
  const Scalars scalars = scalars_of(whole_folder);
  // 9 steps, 4 validations before the last, and the end.
  ASSERT_EQ(expected.size(), 14u);
  ASSERT_EQ(whole.records.at(2).at("val_loss"), 0.5);
  ASSERT_EQ(scalars.count({"validation/val_loss", 9}), 1u);
  EXPECT_EQ(whole.records.at(3).value("replayed", ""), "equal");
  EXPECT_NE(whole.records.at(6).value("skipped", ""), "") << whole.records.at(6);
  for (std::int64_t first = 2; first <= 8; ++first) {
    SCOPED_TRACE(::testing::Message() << "stopped after step " << first);
    const TempFolder folder;
    const MlpTraining training = counting(folder);
    const MlpTrained before = train_mlp(folder, stopped_after(training, first));
    ASSERT_EQ(before.error, "");
    ASSERT_EQ(before.records.back().at("final").at("steps"), first);
    ASSERT_EQ(before.records.back().at("final").at("stopped_by"), "train.max_minutes");
    const MlpTrained after = train_mlp(folder, resumed(training));
    ASSERT_EQ(after.error, "");
    EXPECT_EQ(after.resumed.step, first);
    EXPECT_EQ(after.resumed.sample, first * 8);
    EXPECT_EQ(said(after.records), expected);
    EXPECT_EQ(scalars_of(folder), scalars);
    std::vector<std::int64_t> samples = before.first_samples;
    samples.insert(samples.end(), after.first_samples.begin(), after.first_samples.end());
    EXPECT_EQ(samples, whole.first_samples) << "what is read, and read again to be verified";
    EXPECT_EQ(after.steps.front().step, first + 1);
    EXPECT_EQ(after.steps.size(), static_cast<std::size_t>(9 - first));
  }
}

TEST(ResumedRun, ValidatesOnceAfterAStep) {
  const TempFolder folder;
  std::vector<std::int64_t> validations;
  MlpTraining training = counting(folder);
  training.validate = [&validations](std::int64_t num_done) {
    validations.push_back(num_done);
    return 1.0;
  };
  training.change = [](TrainConfig& config) {
    config.log.val_every = 2;
    config.checkpoint.every = 4;
    config.checkpoint.async = false;
    config.parallel.ranks = 1;
  };
  training.damage = nullptr;
  training.fault = [](std::int64_t step, int, int, float loss) -> float {
    if (step == 2) engine::fail("the machine is gone");  // the fifth, as one rank has 4 samples
    return loss;
  };
  EXPECT_TRUE(has(train_mlp(folder, training).error, {"the machine is gone"}));
  EXPECT_EQ(validations, (std::vector<std::int64_t>{2, 4}));
  validations.clear();
  training.fault = nullptr;
  const MlpTrained after = train_mlp(folder, resumed(training));
  EXPECT_EQ(after.error, "");
  EXPECT_EQ(after.resumed.step, 4);
  EXPECT_EQ(validations, (std::vector<std::int64_t>{6, 8, 9})) << "that of step 4 is in the log";
  // Nothing is left to train, and the last step is one that validates anyway.
  validations.clear();
  training.change = [](TrainConfig& config) {
    config.log.val_every = 3;
    config.parallel.ranks = 1;
  };
  EXPECT_EQ(train_mlp(folder, resumed(training)).error, "");
  EXPECT_EQ(validations, std::vector<std::int64_t>{9});
}

TEST(ResumedRun, EndsWhenItsOwnMinutesAreOver) {
  const TempFolder folder;
  MlpTraining training;
  training.step = {.steps = 9, .max_minutes = 90};
  training.minutes = [](std::int64_t num_done) { return minutes(40 * num_done); };
  // 80 minutes have passed when the third step begins, and 120 when the fourth does.
  EXPECT_EQ(train_mlp(folder, training).records.back().at("final").at("steps"), 4);
  const MlpTrained after = train_mlp(folder, resumed(training));
  EXPECT_EQ(after.records.back().at("final").at("steps"), 8);
  EXPECT_EQ(after.records.back().at("final").at("stopped_by"), "train.max_minutes");
  const MlpTrained last = train_mlp(folder, resumed(training));
  EXPECT_EQ(last.records.back().at("final").at("steps"), 9);
  EXPECT_FALSE(last.records.back().at("final").contains("stopped_by"));
}

TEST(ResumedRun, SkipsInARowAreCountedOverTheInterruption) {
  MlpTraining training;
  training.step = {.steps = 9, .max_skips = 2};
  training.minutes = minute_a_step;
  const auto spoil = [&](std::int64_t first, std::int64_t last) {
    training.damage = [first, last](std::int64_t step, int, int, Mlp& mlp) {
      if (step < first || step > last) return;
      const engine::Parameter& weight = *mlp.blocks().at(1)->parameters.front();
      if (!weight.value.buffer()->resident()) return;
      *weight.value.data<float>() = std::numeric_limits<float>::quiet_NaN();
    };
  };
  const auto has_too_many = [](const std::string& error) {
    return has(error, {"expected at most 2 updates in a row to be skipped", "(step 6)"});
  };
  for (const std::int64_t first : {4, 5}) {
    // Steps 4 to 6, from 1.
    spoil(3, 5);
    const TempFolder whole, folder;
    EXPECT_TRUE(has_too_many(train_mlp(whole, training).error));
    EXPECT_EQ(train_mlp(folder, stopped_after(training, first)).error, "");
    const MlpTrained after = train_mlp(folder, resumed(training));
    EXPECT_EQ(after.resumed.num_skips, first - 3);
    EXPECT_TRUE(has_too_many(after.error));
    // One that is updated ends the row.
    spoil(3, 4);
    const TempFolder fewer;
    EXPECT_EQ(train_mlp(fewer, stopped_after(training, first)).error, "");
    EXPECT_EQ(train_mlp(fewer, resumed(training)).error, "");
  }
}

TEST(ResumedRun, ASpikeIsMeasuredAgainstTheLossesBeforeTheInterruption) {
  MlpTraining training;
  training.step = {.steps = 14, .spike_factor = 4};
  training.minutes = minute_a_step;
  training.fault = [](std::int64_t step, int, int, float loss) {
    return step == 11 ? loss * 100 : loss;
  };
  const auto cause = [](const std::string& error) {
    return error.substr(0, error.find("; the state before it is in "));
  };
  const TempFolder whole, folder;
  const std::string expected = cause(train_mlp(whole, training).error);
  EXPECT_TRUE(has(expected, {"over 4 times the median of the last 11 steps", "(step 12"}));
  EXPECT_EQ(train_mlp(folder, stopped_after(training, 10)).error, "");
  const MlpTrained after = train_mlp(folder, resumed(training));
  EXPECT_EQ(after.resumed.losses.size(), 10u);
  EXPECT_EQ(cause(after.error), expected);
}

TEST(RunLog, TheTimeLeftIsThatOfTheStepsOfThisProcess) {
  const TempFolder folder;
  TrainConfig config;
  config.out = folder.path();
  config.train.steps = 10;
  config.log.every = 1;
  auto now = std::chrono::steady_clock::time_point(minutes(5));
  RunLog log(config, "tokens", "", [&now] { return now; });
  now += minutes(7);  // of loading
  log.begin(6);
  ::testing::internal::CaptureStdout();
  now += std::chrono::seconds(20);
  StepRecord step;
  step.step = 8;  // 10 s each, and two are left
  log.step(step);
  step.step = 9;  // 20 s for three, and one is left
  log.step(step);
  log.flush();
  const std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_TRUE(has(out, {"ETA 0:20\n", "ETA 0:06\n"})) << out;
}

TEST(RunLog, ShowsTheFirstStepOfThisProcessAndThoseThatAreDue) {
  const TempFolder folder;
  TrainConfig config;
  config.out = folder.path();
  config.train.steps = 12;
  config.log.every = 4;
  RunLog log(config, "tokens");
  log.begin(5);
  ::testing::internal::CaptureStdout();
  for (StepRecord step{.step = 6}; step.step <= 12; ++step.step) log.step(step);
  log.flush();
  const std::string out = ::testing::internal::GetCapturedStdout();
  for (std::int64_t step = 6; step <= 12; ++step) {
    const bool is_shown = step == 6 || step == 8 || step == 12;
    EXPECT_EQ(out.find(fmt::format("step {:>5}/12 |", step)) != std::string::npos, is_shown) << out;
  }
}

}  // namespace
}  // namespace tessera::tools

// What comes after the last step: it belongs to a budget of memory, and if it fails all the same
// the last step's checkpoint is there.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tools/launch/ranks.h"
#include "tools/models/mlp.h"
#include "tools/report/run_log.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using testing::has;

// A validation of all ranks, or of one, that fails.
TEST(AfterTheLastStep, AFailureLosesNoCheckpoint) {
  for (const int failing : {-1, 1}) {
    for (const bool async : {true, false}) {
      const testing::TempFolder folder;
      TrainConfig config;
      config.device = DeviceChoice::kCpu;
      config.parallel.ranks = 2;
      config.out = folder.path();
      config.log.every = 0;
      config.train.steps = 4;
      config.train.batch = 2;
      config.train.lr = 1e-3;
      config.checkpoint.every = 2;
      config.checkpoint.async = async;
      RunLog log(config, "samples");
      const auto run = [&] {
        Ranks::choose(config).run(config, [&](comm::ProcessGroup& world) {
          Mlp mlp({.inputs = 400, .hidden = 500, .layers = 3, .classes = 3});
          Trainer trainer(world, engine::Stream::inline_cpu("compute"), config, mlp.blocks(),
                          mlp.root(), world.rank() == 0 ? &log : nullptr);
          trainer.open_checkpoints({"mlp", "data", ""});
          trainer.run(
              {{{"x", {2, 400}, engine::DType::kF32}, {"y", {2}, engine::DType::kI32}},
               [](std::int64_t, const Batch& host) {
                 for (float& x : host[0].span<float>()) x = 0.5f;
                 for (std::int32_t& y : host[1].span<std::int32_t>()) y = 1;
               }},
              [&](std::int64_t, const Batch& batch) { return mlp.loss(trainer.tape(), batch, {}); },
              [&]() -> Trainer::Validation {
                engine::require(failing >= 0 && world.rank() != failing,
                                "[test] expected room, got none");
                world.barrier("the others wait");
                return {0, ""};
              },
              1);
        });
      };
      EXPECT_TRUE(has(testing::error_of<engine::Error>(run), {"expected room"}));
      EXPECT_EQ(folder.read("checkpoints/latest"), "step_4\n") << failing << async;
    }
  }
}

class TrainingProgram : public ::testing::Test {
 protected:
  testing::Outcome run(const std::string& program, const std::string& out,
                       testing::Flags flags) const {
    flags.insert({{"device", "cpu"},
                  {"train.steps", "12"},
                  {"parallel.ranks", "2"},
                  {"log.every", "0"},
                  {"log.peak_ms", "0"},
                  {"out", folder_ / out}});
    return testing::run_program("tools/programs/" + program, flags);
  }
  static std::int64_t smallest_budget(const testing::Outcome& refused) {
    return first_number(refused.err, "the smallest budget that fits is ([0-9,]+) bytes");
  }
  nlohmann::json last_record(const std::string& out) const {
    std::istringstream lines(folder_.read(out + "/log.jsonl"));
    std::string last;
    for (std::string line; std::getline(lines, line);) last = line;
    return testing::parse_json(last);
  }
  static std::int64_t first_number(const std::string& text, const std::string& pattern) {
    std::smatch match;
    if (!std::regex_search(text, match, std::regex(pattern))) return -1;
    std::string digits = match[1];
    std::erase(digits, ',');
    return std::stoll(digits);
  }

  const testing::TempFolder folder_;
};

class MlpProgram : public TrainingProgram {
 protected:
  testing::Outcome run(const std::string& out, const testing::Flags& flags) const {
    return TrainingProgram::run("train_mlp", out, flags);
  }
};

// 500 images at once are more than a step of 16; within a budget they come 16 at a time.
TEST_F(MlpProgram, AValidationKeepsToTheBudgetAndHasTheSameLoss) {
  const testing::Outcome free = run("free", {{"train.batch", "16"}});
  ASSERT_EQ(free.exit_code, 0) << free.err;
  const testing::Outcome plan = run("plan", {{"train.batch", "16"}, {"plan", "true"}});
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  const std::int64_t validation = first_number(plan.out, "validation, in all +([0-9,]+) B");
  ASSERT_GT(validation, 0) << plan.out;
  const std::string budget = std::to_string(validation - 1000);
  const testing::Outcome kept =
      run("kept", {{"train.batch", "16"}, {"memory_budget", budget}, {"checkpoint.every", "5"}});
  ASSERT_EQ(kept.exit_code, 0) << kept.err;
  EXPECT_TRUE(has(kept.out, {"as asked"}));
  EXPECT_FALSE(has(kept.out, {"too much"})) << kept.out;
  const nlohmann::json a = last_record("free").at("final"), b = last_record("kept").at("final");
  EXPECT_EQ(a.at("params_sha256"), b.at("params_sha256"));
  EXPECT_EQ(a.at("test_accuracy"), b.at("test_accuracy"));
  EXPECT_NEAR(a.at("val_loss").get<double>(), b.at("val_loss").get<double>(), 1e-6);
}

// As little as the plan says is enough to the very end, and less is refused before the first step.
TEST_F(MlpProgram, TheSmallestBudgetIsEnough) {
  const testing::Outcome refused = run("refused", {{"memory_budget", "1kB"}});
  EXPECT_EQ(refused.exit_code, 1);
  const std::int64_t smallest = smallest_budget(refused);
  ASSERT_GT(smallest, 0) << refused.err;
  const testing::Outcome less = run("refused", {{"memory_budget", std::to_string(smallest - 1)}});
  EXPECT_EQ(less.exit_code, 1);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "refused")) << "nothing is begun";
  const testing::Outcome enough = run("enough", {{"memory_budget", std::to_string(smallest)},
                                                 {"checkpoint.every", "5"},
                                                 {"train.steps", "6"},
                                                 {"log.val_every", "3"}});
  EXPECT_EQ(enough.exit_code, 0) << enough.err;
  EXPECT_TRUE(has(enough.out, {"the same samples", "train.batch=1"})) << enough.out;
}

// Of a model with more positions than a sequence of the training has, the sample reads more than a
// step does.
TEST_F(TrainingProgram, TheSmallestBudgetIsEnoughForTheSample) {
  std::string text;
  while (text.size() < 4000) text += "In the beginning God created the heaven and the earth.\n";
  testing::Flags flags = {
      {"data.path", folder_.write("text.txt", text)}, {"train.batch", "1"}, {"train.steps", "3"}};
  const auto with = [&](testing::Flags more) {
    more.insert(flags.begin(), flags.end());
    return more;
  };
  const testing::Outcome made = run("train_transformer", "made",
                                    with({{"model.layers", "2"},
                                          {"model.heads", "2"},
                                          {"model.dim", "16"},
                                          {"model.seq", "256"},
                                          {"sample.tokens", "0"},
                                          {"save.final", folder_ / "model"}}));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  flags.insert({{"init.from", folder_ / "model"}, {"model.seq", "8"}});
  const auto smallest = [&](const char* program, const char* num_tokens) {
    const testing::Flags little = {{"memory_budget", "1kB"}, {"sample.tokens", num_tokens}};
    return smallest_budget(run(program, "refused", with(little)));
  };
  const std::int64_t least = smallest("train_transformer", "300");
  EXPECT_GT(least, smallest("train_transformer", "200"));
  EXPECT_GT(least, smallest("train_transformer", "0"));
  EXPECT_EQ(least, smallest("plan", "300"));
  const testing::Outcome enough =
      run("train_transformer", "enough",
          with({{"memory_budget", std::to_string(least)}, {"sample.tokens", "300"}}));
  EXPECT_EQ(enough.exit_code, 0) << enough.err;
  EXPECT_TRUE(std::filesystem::exists(folder_ / "enough/sample.txt"));
}

}  // namespace
}  // namespace tessera::tools

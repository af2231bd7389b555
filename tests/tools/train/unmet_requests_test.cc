#include "tools/train/unmet_requests.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

TrainConfig config_of(std::int64_t steps) {
  TrainConfig config;
  config.train.steps = steps;
  config.train.lr = 4e-3;
  config.out = "out";
  return config;
}

std::vector<double> losses(std::size_t n) { return std::vector<double>(n, 1.0); }

TEST(UnmetRequests, EachIsSaidFromWhereItCannotBeMet) {
  const auto warmup = [](TrainConfig& c) { c.train.warmup = 20; };
  const auto verify = [](TrainConfig& c) { c.train.verify_every = 10; };
  const auto spike = [](TrainConfig& c) { c.train.spike_factor = 3; };
  const auto power = [](TrainConfig& c) {
    c.comm.hook = "powersgd";
    c.comm.powersgd.start_step = 10;
  };
  const auto automatic = [](TrainConfig& c) { c.checkpoint.resume = "auto"; };
  const struct {
    std::string what;
    std::function<void(TrainConfig&)> ask;
    std::int64_t steps;
    TrainPosition start;
    std::string says;  // empty: nothing
  } cases[] = {
      {"plain", [](TrainConfig&) {}, 1, {}, ""},
      {"no steps at all", [](TrainConfig&) {}, 0, {}, ""},
      {"done",
       [](TrainConfig&) {},
       5,
       {.step = 5},
       "no step is left to train: train.steps=5, and as many are done"},
      {"not done", [](TrainConfig&) {}, 5, {.step = 4}, ""},
      {"no rate",
       [](TrainConfig& c) { c.train.lr = 0; },
       5,
       {},
       "no parameter is updated: train.lr=0"},
      {"a rate that is none in f32",
       [](TrainConfig& c) { c.train.lr = 1e-60; },
       5,
       {},
       "no parameter is updated: train.lr=1e-60"},
      {"warmup",
       warmup,
       19,
       {},
       "the warmup is longer than the run (train.warmup=20, train.steps=19): the learning rate "
       "ends at 0.0038 and never reaches train.lr=0.004"},
      {"short warmup", warmup, 20, {}, ""},
      {"verify",
       verify,
       9,
       {},
       "no step is verified: train.verify_every=10, and the run has the "
       "steps 1 to 9"},
      {"verify last", verify, 10, {}, ""},
      {"verify after", verify, 19, {.step = 10}, "the run has the steps 11 to 19"},
      {"verify next", verify, 20, {.step = 10}, ""},
      {"spike",
       spike,
       8,
       {},
       "no loss is checked by train.spike_factor=3: that takes 8 steps before it, and the last "
       "loss has 7"},
      {"spike last", spike, 9, {}, ""},
      {"spike resumed", spike, 14, {.step = 10, .losses = losses(4)}, "and the last loss has 7"},
      {"spike remembered", spike, 14, {.step = 10, .losses = losses(5)}, ""},
      {"powersgd",
       power,
       10,
       {},
       "nothing is compressed by comm.hook=powersgd: "
       "powersgd.start_step=10, and train.steps=10"},
      {"powersgd last", power, 11, {}, ""},
      {"auto",
       automatic,
       3,
       {},
       "this run saves nothing that the next --resume=auto could go on "
       "from: give --checkpoint.every=N"},
      {"auto that saves",
       [&](TrainConfig& c) {
         automatic(c);
         c.checkpoint.every = 2;
       },
       3,
       {},
       ""},
  };
  for (const auto& c : cases) {
    TrainConfig config = config_of(c.steps);
    c.ask(config);
    const std::vector<std::string> lines = unmet_requests(config, c.start);
    EXPECT_EQ(lines.size(), c.says.empty() ? 0u : 1u) << c.what;
    for (const std::string& line : lines) EXPECT_TRUE(testing::has(line, {c.says})) << c.what;
  }
}

TEST(UnmetRequests, AreSaidTogether) {
  TrainConfig config = config_of(5);
  config.train.warmup = 20;
  config.train.verify_every = 7;
  config.checkpoint.resume = "auto";
  EXPECT_EQ(unmet_requests(config, {}).size(), 3u);
}

}  // namespace
}  // namespace tessera::tools

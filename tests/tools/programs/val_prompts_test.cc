// How prompts go on after each validation: equal texts whoever trains, and what is refused.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

class ValPrompts : public testing::TinyTraining {
 protected:
  ValPrompts() {
    flags_["log.val_prompts"] = folder_.write("prompts.txt", "God\nIn the b\nt\n");
    flags_["log.val_every"] = "1";
    flags_["sample.tokens"] = "4";
    flags_["train.lr"] = "0.1";  // so that texts change
    flags_["train.warmup"] = "0";
  }

  /// Of each validation in order. `to`: the output folder.
  std::vector<json> continuations(const Flags& more = {}, const std::string& to = "run") const {
    Flags flags = more;
    flags["out"] = folder_ / to;
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    std::vector<json> all;
    std::istringstream file(folder_.read(to + "/log.jsonl"));
    for (std::string line; std::getline(file, line);) {
      const json record = testing::parse_json(line);
      const json& of_step = record.contains("final") ? record.at("final") : record;
      if (of_step.contains("continuations")) all.push_back(of_step.at("continuations"));
    }
    return all;
  }
};

TEST_F(ValPrompts, AreSaidAndLoggedAfterEachValidation) {
  const std::vector<json> all = continuations({{"log.every", "1"}});
  ASSERT_EQ(all.size(), 3U);
  for (const json& of_step : all) {
    ASSERT_EQ(of_step.size(), 3U);
    EXPECT_EQ(of_step[0].at("prompt"), "God");
    EXPECT_EQ(of_step[0].at("tokens").size(), 4U);
    EXPECT_EQ(of_step[0].at("end"), "tokens");
    // The model has eight positions, of which the prompt takes all.
    EXPECT_EQ(of_step[1].at("prompt"), "In the b");
    EXPECT_EQ(of_step[1].at("tokens").size(), 1U);
    EXPECT_EQ(of_step[1].at("end"), "positions");
  }
  for (const json& line : log_lines()) {
    const json& record = line.contains("final") ? line.at("final") : line;
    EXPECT_EQ(record.contains("val_loss"), record.contains("continuations")) << line;
  }
}

TEST_F(ValPrompts, StandAfterTheLoss) {
  const std::string out = run({{"log.val_every", "0"}}).out;
  const auto loss = out.find("3/3 | val loss"), first = out.find("\n  God => ");
  const auto second = out.find("\n  In the b => "), third = out.find("\n  t => ");
  ASSERT_NE(third, std::string::npos) << out;
  EXPECT_LT(loss, first);
  EXPECT_LT(first, second);
  EXPECT_LT(second, third);
}

// Nor do texts change the training, or a budget, with which nothing is kept, the texts.
TEST_F(ValPrompts, GoOnAlikeUnderEveryStrategyAndOnAnyRanks) {
  const std::vector<json> all = continuations();
  ASSERT_EQ(all.size(), 3U);
  EXPECT_NE(all[0], all[2]) << "they change as the model learns";
  const std::string digest = final_record().at("params_sha256");
  for (const Flags& more : std::vector<Flags>{{{"parallel.strategy", "ddp"}},
                                              {{"parallel.strategy", "zero2"}},
                                              {{"parallel.strategy", "hfsdp"}},
                                              {{"parallel.ranks", "1"}, {"train.accum", "2"}},
                                              {{"memory_budget", "1GiB"}}}) {
    SCOPED_TRACE(more.begin()->second);
    EXPECT_EQ(continuations(more), all);
    EXPECT_EQ(final_record().at("params_sha256"), digest);
  }
  EXPECT_EQ(run({{"log.val_prompts", ""}}).exit_code, 0);
  EXPECT_EQ(final_record().at("params_sha256"), digest);
}

// Also where the log does not have the validation after the step that the run goes on from.
TEST_F(ValPrompts, GoOnAlikeAfterAResume) {
  const std::vector<json> all = continuations({{"checkpoint.every", "1"}});
  ASSERT_EQ(all.size(), 3U);
  const Flags resumed = {{"resume", folder_ / "run/checkpoints/step_1"}};
  EXPECT_EQ(continuations(resumed, "elsewhere"), all);
  EXPECT_EQ(continuations(resumed), all);
}

// With the keys and values of each: 8 tokens, two layers, two tensors of 8 numbers.
TEST_F(ValPrompts, AreInThePlanOfATraining) {
  const auto planned_nbytes = [&](const std::string& prompts) {
    const Outcome outcome = run({{"audit", "true"}, {"log.val_prompts", prompts}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return final_record().at("planned").at("continuations_peak_bytes").get<int>();
  };
  const int one = planned_nbytes(folder_.write("one.txt", "In the b\n"));
  EXPECT_GE(planned_nbytes(flags_.at("log.val_prompts")), one + 2 * 8 * 2 * 2 * 8 * 4);
}

TEST_F(ValPrompts, ThatCannotBeHonouredAreRefused) {
  struct Case {
    Flags flags;
    const char* what;
  };
  const std::string prompts = flags_.at("log.val_prompts");
  for (const Case& c : std::vector<Case>{
           {{{"log.val_prompts", folder_ / "none"}}, "none"},
           {{{"log.val_prompts", folder_.write("empty", "")}},
            "expected prompts, got an empty file"},
           {{{"log.val_prompts", folder_.write("long", "God\nIn the beg\n")}},
            "expected a prompt of 1 to 8 tokens, the positions of the model, got 10 (prompt 2: In"},
           {{{"log.val_prompts", folder_.write("gap", "God\n\nIn\n")}}, "got an empty line"},
           {{{"log.val_prompts", folder_.write("a.jsonl", "{}")}},
            "expected a text of prompts for a model whose tokens are bytes"},
           {{{"data.val_fraction", "0"}, {"log.val_every", "0"}},
            "expected something to validate on with log.val_prompts, got none (data.val_fraction)"},
           {{{"sample.tokens", "0"}},
            "expected sample.tokens of at least 1 with log.val_prompts, got 0"},
           {{{"log.jsonl", prompts}}, "log.val_prompts"}}) {
    SCOPED_TRACE(c.what);
    const Outcome outcome = run(c.flags);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"error: [", c.what})) << outcome.err;
    EXPECT_FALSE(exists("run/log.jsonl"));
  }
  EXPECT_EQ(folder_.read("prompts.txt"), "God\nIn the b\nt\n");
}

// Of ids that no tokenizer reads.
TEST_F(ValPrompts, NeedTheTokenizerOfTheData) {
  const Outcome outcome = run(
      {{"data.path", folder_.write("ids.bin", std::string(2000, '\0'))}, {"model.vocab", "300"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"expected the tokenizer of the data with log.val_prompts, got none "
                                "(data.tokenizer)"}))
      << outcome.err;
}

}  // namespace
}  // namespace tessera

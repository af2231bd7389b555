// Training on the lines of a .jsonl, which the program tokenizes itself.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tests/tools/tokenizer/small_tokenizer.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Outcome;

class Jsonl : public testing::TinyTraining {
 protected:
  Jsonl() {
    std::string lines;
    for (int i = 0; i < 30; ++i) {
      const std::string words = i % 3 == 0 ? "abc ab cd" : i % 3 == 1 ? "dab cab" : "a b c d ab";
      lines += R"({"ask": ")" + words.substr(0, i % 4) + R"(", "say": ")" + words + "\"}\n";
    }
    flags_["data.path"] = folder_.write("a.jsonl", lines);
    flags_["data.tokenizer"] = folder_.write("tokenizer.json", testing::small_tokenizer().dump());
    flags_["data.field"] = "say";
    flags_["data.prompt"] = "ask";
    flags_["data.end"] = "<e>";
    flags_["data.val_fraction"] = "0.2";
    flags_["model.vocab"] = "10";
  }
};

TEST_F(Jsonl, TrainsAsWhatTokenizeWritesDoes) {
  const Outcome made = testing::run_program(
      "tools/tokenize/tokenize",
      std::vector<std::string>{"--tokenizer=" + flags_["data.tokenizer"], "--field=say",
                               "--prompt=ask", "--end=<e>", "--out=" + (folder_ / "a.bin"),
                               flags_["data.path"]});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  for (const char* packing : {"false", "true"}) {
    const Outcome outcome = run({{"data.packing", packing}, {"audit", "true"}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.out.find("differs"), std::string::npos) << outcome.out;
    const auto lines = final_record();
    Flags written = flags_;
    for (const char* option : {"data.field", "data.prompt", "data.end", "data.tokenizer"})
      written.erase(option);
    written["data.path"] = folder_ / "a.bin";
    written["data.packing"] = packing;
    EXPECT_EQ(testing::run_program(testing::kTransformer, written).exit_code, 0);
    EXPECT_EQ(final_record().at("params_sha256"), lines.at("params_sha256"));
    EXPECT_EQ(final_record().at("val_loss"), lines.at("val_loss"));
  }
}

TEST_F(Jsonl, SamplesAreText) {
  const Outcome outcome = run({{"sample.tokens", "20"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string sample = folder_.read("run/sample.txt");
  EXPECT_EQ(sample.find_first_not_of("abcd <e>\n"), std::string::npos) << sample;
  EXPECT_GE(sample.size(), 20U);
}

// Of a .jsonl like the data's, or of text.
TEST_F(Jsonl, PromptsAreReadByTheTokenizer) {
  const auto continuations = [&](const std::string& prompts, const Flags& more) {
    Flags flags = more;
    flags["log.val_prompts"] = prompts;
    flags.insert({"sample.tokens", "5"});
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return final_record().at("continuations");
  };
  const std::string asked = folder_.write("prompts.jsonl", R"({"ask": "ab", "say": "c"})"
                                                           "\n"
                                                           R"({"ask": "d", "say": ""})");
  const auto all = continuations(asked, {});
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].at("prompt"), "ab");
  EXPECT_EQ(all[1].at("prompt"), "d");
  for (const auto& one : all) {
    const std::string text = one.at("text"), end = one.at("end");
    EXPECT_EQ(text.find_first_not_of("abcd "), std::string::npos) << text;
    EXPECT_EQ(one.at("tokens").back() == 9, end == "eos") << one;
    EXPECT_TRUE(end == "eos" || one.at("tokens").size() == 5U) << one;
  }
  EXPECT_EQ(continuations(folder_.write("prompts.txt", "ab\nd\n"), {}), all);
  EXPECT_EQ(continuations(asked, {{"parallel.strategy", "ddp"}, {"data.packing", "true"}}).size(),
            2U);
}

// The token that ends each document ends a text.
TEST_F(Jsonl, PromptsGoOnUntilADocumentEnds) {
  std::string lines;
  for (int i = 0; i < 30; ++i) lines += "{\"ask\": \"a\", \"say\": \"cd\"}\n";
  const Outcome outcome = run({{"data.path", folder_.write("b.jsonl", lines)},
                               {"log.val_prompts", folder_.write("prompts.txt", "a\n")},
                               {"sample.tokens", "7"},
                               {"train.steps", "60"},
                               {"train.lr", "0.05"},
                               {"train.warmup", "0"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"\n  a => cd\n"})) << outcome.out;
  const auto made = final_record().at("continuations").at(0);
  EXPECT_EQ(made.at("tokens"), nlohmann::json({7, 9}));
  EXPECT_EQ(made.at("end"), "eos");
}

TEST_F(Jsonl, StepsAreSaidInEpochs) {
  EXPECT_TRUE(has(run().out, {"training: 3 steps of 2 samples, 0.19 epochs\n"}));
  EXPECT_TRUE(has(run({{"train.batch", "64"}}).out,
                  {"training: 3 steps of 128 samples, 12 epochs; a step has more than all 31\n"}));
}

// Of all documents alike: "ab cd" and its end are three tokens and five bytes, and of a prompt of
// "a" nothing is learned.
TEST_F(Jsonl, ValidationSaysPerplexitiesOfTokensAndOfBytes) {
  std::string lines;
  for (int i = 0; i < 30; ++i) lines += "{\"ask\": \"a\", \"say\": \"cd ab\"}\n";
  const Outcome outcome = run({{"data.path", folder_.write("b.jsonl", lines)}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const double loss = final_record().at("val_loss");
  EXPECT_TRUE(has(outcome.out, {fmt::format("(perplexity {:.2f} a token, {:.3f} a byte)",
                                            std::exp(loss), std::exp(loss * 3 / 5))}))
      << outcome.out;
}

TEST_F(Jsonl, IsPlannedWithoutItsTokens) {
  const Flags flags = with({});
  const Outcome planned = testing::run_program("tools/programs/plan", flags);
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  EXPECT_TRUE(has(planned.out, {"all_gather     weight"}));
  Flags elsewhere = flags;  // where the data are not
  elsewhere["data.path"] = "/nowhere/a.jsonl";
  EXPECT_EQ(testing::run_program("tools/programs/plan", elsewhere).exit_code, 0);
}

TEST_F(Jsonl, AResumedRunSaysThatItsLinesAreReadOtherwise) {
  const Flags saving = {{"checkpoint.every", "3"}, {"checkpoint.dir", folder_ / "saved"}};
  EXPECT_EQ(run(saving).exit_code, 0);
  const Flags resumed = {{"resume", folder_ / "saved/step_3"}, {"train.steps", "4"}};
  EXPECT_EQ(run(resumed).out.find("data.loss"), std::string::npos);
  Flags other = resumed;
  other["data.loss"] = "all";
  EXPECT_TRUE(has(run(other).out, {"other data", "so a sample is another",
                                   "  changed: data.loss=\"all\" (was \"completion\")"}));
}

TEST_F(Jsonl, IsAPartOfAMix) {
  flags_.erase("data.path");
  const Outcome made = testing::run_program(
      "tools/tokenize/tokenize",
      std::vector<std::string>{"--tokenizer=" + flags_["data.tokenizer"], "--field=ask",
                               "--documents", "--out=" + (folder_ / "b.bin"), folder_ / "a.jsonl"});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  const std::string lines = (folder_ / "a.jsonl") + ":3";
  const Outcome mixed = run({{"data.mix", lines + "," + (folder_ / "b.bin") + ":1"}});
  EXPECT_EQ(mixed.exit_code, 0) << mixed.err;
  EXPECT_TRUE(has(mixed.out, {"75.0% of ", "a.jsonl, 31 sequences of 8 at most"}));
  const Outcome text = run({{"data.mix", lines + "," + (folder_ / "text.txt") + ":1"}});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_TRUE(has(text.out, {"a.jsonl, 31 sequences of 8 at most", "; 25.0% of ", "text.txt, "}));
}

}  // namespace
}  // namespace tessera

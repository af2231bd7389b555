// Training on a text, which the program tokenizes itself.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tests/tools/tokenizer/small_tokenizer.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

const std::string kPlanProgram = "tools/programs/plan";

class Text : public testing::TinyTraining {
 protected:
  Text() {
    std::string text, lines;
    for (int i = 0; i < 60; ++i) {
      const std::string words = i % 3 == 0 ? "abc ab cd" : i % 3 == 1 ? "dab cab" : "a b c d ab";
      text += words + "\n";
      if (i < 20) lines += R"({"text": ")" + words.substr(0, 4 + i % 4) + "\"}\n";
    }
    flags_["data.path"] = folder_.write("a.txt", text);
    folder_.write("a.jsonl", lines);
    flags_["data.tokenizer"] = folder_.write("tokenizer.json", testing::small_tokenizer().dump());
    flags_["data.val_fraction"] = "0.2";
    flags_["model.vocab"] = "10";
  }
  /// What //tools:tokenize makes of the text, by its own defaults.
  std::string tokenized(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--tokenizer=" + flags_.at("data.tokenizer"),
                                          "--out=" + (folder_ / "a.bin"), folder_ / "a.txt"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome made = testing::run_program("tools/tokenize/tokenize", arguments);
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return folder_ / "a.bin";
  }
  json trained(const Flags& flags) const {
    const Outcome outcome = testing::run_program(testing::kTransformer, flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return final_record();
  }
};

TEST_F(Text, TrainsAsWhatTokenizeWritesDoes) {
  for (const std::string end : {"auto", "<e>"}) {
    const json text = trained(with({{"data.end", end}}));
    Flags written = flags_;
    written["data.path"] = tokenized({"--end=" + (end == "auto" ? "none" : end)});
    const json ids = trained(written);
    for (const char* what : {"params_sha256", "val_loss", "data_digest"})
      EXPECT_EQ(text.at(what), ids.at(what)) << what << " " << end;
  }
}

TEST_F(Text, OfAModelIsTokenizedByItsTokenizer) {
  Flags flags = with({{"train.steps", "0"}, {"save.final", folder_ / "model"}});
  trained(flags);
  folder_.write("model/tokenizer.json", testing::small_tokenizer().dump());
  Flags from = {{"init.from", folder_ / "model"}};
  for (const char* same : {"data.path", "data.val_fraction", "train.steps", "train.batch",
                           "parallel.ranks", "device", "out", "sample.tokens", "log.peak_ms"})
    from[same] = flags_.at(same);
  const json text = trained(from);
  from["data.path"] = tokenized();
  EXPECT_EQ(trained(from).at("params_sha256"), text.at("params_sha256"));
  from["data.path"] = folder_ / "text.txt";  // whose letters the tokenizer leaves out but for four
  from["sample.tokens"] = "9";
  trained(from);
  const std::string sample = folder_.read("run/sample.txt");
  EXPECT_EQ(sample.find_first_not_of("abcd <e>\n"), std::string::npos) << sample;
}

TEST_F(Text, IsPlannedAsItIsTrained) {
  for (const bool mixed : {false, true}) {
    Flags flags = with({{"plan", "true"}});
    if (mixed) {
      flags.erase("data.path");
      flags["data.mix"] = (folder_ / "a.txt:1,") + (folder_ / "a.jsonl:1");
      flags["data.end"] = "<e>";
    }
    const Outcome planned = testing::run_program(testing::kTransformer, flags);
    EXPECT_EQ(planned.exit_code, 0) << planned.err;
    flags.erase("plan");
    const Outcome plan = testing::run_program(kPlanProgram, flags);
    EXPECT_EQ(plan.exit_code, 0) << plan.err;
    const auto without_time = [](const std::string& text) {
      return text.substr(0, text.find(", which took this host"));
    };
    EXPECT_EQ(without_time(plan.out), without_time(planned.out));
    const bool by_tokens = plan.out.find("all_gather     weight") != std::string::npos;
    EXPECT_EQ(by_tokens, mixed) << "as where lines are documents";
  }
}

TEST_F(Text, MixedWithLinesHasTheBitsOfOneRank) {
  flags_.erase("data.path");
  flags_["data.mix"] = (folder_ / "a.txt:0.3,") + (folder_ / "a.jsonl:0.7");
  flags_["data.end"] = "<e>";
  flags_["train.steps"] = "6";
  for (const char* packing : {"false", "true"}) {
    const Flags one = {{"data.packing", packing}, {"parallel.ranks", "1"}, {"train.accum", "2"}};
    const json alone = trained(with(one));
    const Outcome two = run({{"data.packing", packing}, {"audit", "true"}});
    EXPECT_EQ(two.exit_code, 0) << two.err;
    EXPECT_EQ(two.out.find("differs"), std::string::npos) << two.out;
    EXPECT_TRUE(has(two.out, {"30.0% of ", "a.txt, ", "; 70.0% of ", "a.jsonl, "})) << two.out;
    EXPECT_EQ(final_record().at("params_sha256"), alone.at("params_sha256"));
    EXPECT_EQ(final_record().at("val_loss"), alone.at("val_loss"));
    // As when both are made ids first.
    Flags written = with(one);
    written["data.mix"] = tokenized({"--end=<e>"}) + ":0.3," + (folder_ / "a.jsonl:0.7");
    EXPECT_EQ(trained(written).at("params_sha256"), alone.at("params_sha256"));
  }
}

}  // namespace
}  // namespace tessera

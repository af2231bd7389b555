// The program that shows what a training reads.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/data/token_writer.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Outcome;

class Data : public testing::TinyTraining {
 protected:
  Data() : tokenizer_(folder_.write("tokenizer.json", testing::small_tokenizer().dump())) {}
  Outcome show(const Flags& more) const {
    return testing::run_program("tools/samples/data", with(more));
  }

  const std::string tokenizer_;
};

TEST_F(Data, ShowsBytesAsText) {
  const Outcome outcome =
      show({{"data.order", "sequential"}, {"show", "1"}, {"count", "2"}, {"model.seq", "12"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"data: " + (folder_ / "text.txt") + ", 3", " sequences of 12\n",
                                "validation: 1 sequences of 12\n", "sample 1, ",
                                "  tokens 12 to 24\n", "    read    |n|\n",
                                "    learned |ing God crea|\n", "sample 2, ", "|ted the heav|"}));
}

// Everything that says what a sample is says it here.
TEST_F(Data, ShowsWhatTrainingReads) {
  const std::string one = show({}).out;
  EXPECT_NE(show({{"train.seed", "7"}}).out, one);
  EXPECT_NE(show({{"show", "1"}}).out, one);
  EXPECT_NE(show({{"model.seq", "6"}}).out, one);
  EXPECT_EQ(show({{"train.lr", "0.5"}, {"parallel.ranks", "3"}}).out, one);
  const Outcome validation = show({{"validation", "true"}, {"data.val_fraction", "0.5"}});
  EXPECT_TRUE(has(validation.out, {"validation sequence 0, "}));
}

// What //tools:tokenize writes.
TEST_F(Data, ShowsDocumentsByTheTokenizer) {
  folder_.write("a.jsonl", "{\"q\": \"abc\", \"a\": \" abd\"}\n{\"q\": \"dc\", \"a\": \"ba\"}\n");
  const Outcome made = testing::run_program(
      "tools/tokenize/tokenize",
      std::vector<std::string>{"--tokenizer=" + tokenizer_, "--field=a", "--prompt=q", "--end=<e>",
                               "--out=" + (folder_ / "a.bin"), folder_ / "a.jsonl"});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  const Flags flags = {{"data.path", folder_ / "a.bin"},
                       {"data.val_fraction", "0"},
                       {"data.packing", "true"},
                       {"model.vocab", "10"},
                       {"model.seq", "16"}};
  const Outcome ids = show(flags);
  EXPECT_EQ(ids.exit_code, 0) << ids.err;
  const auto whole = [&](const std::vector<std::string>& texts) {
    return "sample 0, " + (folder_ / "a.bin") + ": 7 tokens, 6 learned, 9 of padding\n" +
           "  document 0, tokens 0 to 3\n    read    |" + texts[0] + "|\n    learned |" + texts[1] +
           "|\n  document 1, tokens 4 to 8\n    read    |" + texts[2] + "|\n    learned |" +
           texts[3] + "|\n";
  };
  EXPECT_TRUE(has(ids.out, {whole({"6", " 8 3 9", "3 2", " 1 0 9"})}));
  Flags decoded = flags;
  decoded["data.tokenizer"] = tokenizer_;
  EXPECT_TRUE(has(show(decoded).out, {whole({"abc", " abd<e>", "dc", "ba<e>"})}));
  // The lines themselves.
  decoded["data.path"] = folder_ / "a.jsonl";
  for (const char* option : {"field=a", "prompt=q", "end=<e>"}) {
    const std::string_view words = option;
    decoded["data." + std::string(words.substr(0, words.find('=')))] =
        words.substr(words.find('=') + 1);
  }
  EXPECT_TRUE(has(show(decoded).out, {"    read    |abc|\n    learned | abd<e>|\n"}));
}

TEST_F(Data, ShowsATextByItsTokenizer) {
  const Outcome outcome = show({{"data.path", folder_.write("a.txt", "abc ab cd abc dab cab")},
                                {"data.tokenizer", tokenizer_},
                                {"data.order", "sequential"},
                                {"data.val_fraction", "0"},
                                {"model.vocab", "10"},
                                {"model.seq", "4"},
                                {"show", "1"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"a.txt, 2 sequences of 4\n", "sample 1, ",
                                "a.txt: 4 tokens, 4 learned, 0 of padding\n  tokens 4 to 8\n",
                                "    read    | |\n    learned |abc dab|\n"}))
      << outcome.out;
}

TEST_F(Data, RefusesWhatItCannotShow) {
  const std::pair<Flags, std::string> cases[] = {
      {{{"data.tokenizer", tokenizer_}, {"data.format", "bytes"}},
       "no tokenizer of data whose tokens are bytes"},
      {{{"validation", "true"}, {"show", "2"}, {"data.val_fraction", "0"}},
       "below the 0 that are kept"},
      {{{"data.packing", "true"}}, "expected documents to pack"},
      {{{"show", "-1"}}, "show"},
  };
  for (const auto& [flags, words] : cases) {
    const Outcome outcome = show(flags);
    EXPECT_EQ(outcome.exit_code, 1) << words;
    EXPECT_TRUE(has(outcome.err, {words}));
  }
  tools::TokenWriter writer(20);
  writer.add(std::vector<std::int32_t>(100, 15));
  writer.write(folder_ / "b.bin");
  const Outcome other = show({{"data.path", folder_ / "b.bin"}, {"data.tokenizer", tokenizer_}});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_TRUE(has(other.err, {"expected tokens of the tokenizer", "which has 10, got 15",
                              "(data.tokenizer, "}));
  // Of a mix the tokens of each file.
  const std::string lines = folder_.write("c.jsonl", "{\"text\": \"abc ab\"}\n");
  const Outcome mixed = show({{"data.path", ""},
                              {"data.mix", lines + ":1," + (folder_ / "b.bin") + ":1"},
                              {"data.tokenizer", tokenizer_},
                              {"data.end", "<e>"},
                              {"data.val_fraction", "0"}});
  EXPECT_EQ(mixed.exit_code, 1);
  EXPECT_TRUE(
      has(mixed.err, {"expected tokens of the tokenizer", "which has 10, got 15", "b.bin"}));
}

}  // namespace
}  // namespace tessera

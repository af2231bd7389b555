// The program, and that trainers read what it writes.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/data/token_file.h"
#include "tools/data/token_writer.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::has;
using testing::Outcome;
using Ids = std::vector<std::int32_t>;

class Tokenize : public ::testing::Test {
 protected:
  Tokenize() {
    folder_.write("tokenizer.json", testing::small_tokenizer().dump());
    folder_.write("a.txt", "abc ab");
    folder_.write("b.txt", "");
    folder_.write("c.jsonl", "{\"words\": \"cd<e>\"}\n{\"words\": \"a\\ud7ff\"}\n");
  }
  Outcome run(std::vector<std::string> arguments) const {
    return testing::run_program("tools/tokenize/tokenize", arguments,
                                {{"BUILD_WORKING_DIRECTORY", folder_.path()}});
  }
  Ids tokens_of(const std::string& path, std::int64_t vocab) const {
    const tools::TokenFile file(path);
    EXPECT_TRUE(file.has_header());
    Ids ids(static_cast<std::size_t>(file.num_tokens()));
    file.read(0, vocab, ids);
    return ids;
  }
  /// Of a tokenizer that puts <e> before a text.
  void put_end_first() const {
    folder_.write("tokenizer.json", testing::small_tokenizer_with_end(/*is_first=*/true).dump());
  }
  const testing::TempFolder folder_;
};

TEST_F(Tokenize, PrintsAListForEachDocument) {
  const Outcome outcome =
      run({"--tokenizer", ".", "--field", "words", "a.txt", "b.txt", folder_ / "c.jsonl"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "[6, 8]\n[]\n[7, 9]\n[0]\n");
  const Outcome ended = run({"a.txt", "b.txt", "--end=<e>", "--tokenizer=tokenizer.json"});
  EXPECT_EQ(ended.out, "[6, 8, 9]\n[9]\n") << ended.err;
}

TEST_F(Tokenize, WritesWhatTrainersRead) {
  const Outcome outcome =
      run({"--tokenizer=.", "--field=words", "--end=<e>", "--out=all.bin", "a.txt", "c.jsonl"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out,
                  {"8 tokens of 16 bits in ", "all.bin: 3 documents, ", "a vocabulary of 10"}));
  EXPECT_EQ(tokens_of(folder_ / "all.bin", 10), (Ids{6, 8, 9, 7, 9, 9, 0, 9}));
  EXPECT_EQ(tools::TokenFile(folder_ / "all.bin").token_nbytes(), 2);
}

TEST_F(Tokenize, WarnsOfATextThatIsNotUtf8) {
  folder_.write("latin.txt", "ab\xdf");
  const Outcome outcome = run({"--tokenizer=.", "--out=all.bin", "latin.txt"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.err, {"warning: [tokenize] ", "latin.txt is not UTF-8"})) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"all.bin: 1 document, 3 bytes"})) << outcome.out;
  EXPECT_EQ(run({"--tokenizer=.", "a.txt"}).err, "");
}

TEST_F(Tokenize, SpecialTokensAreLeftOutWhenNotWanted) {
  put_end_first();
  EXPECT_EQ(run({"--tokenizer=.", "a.txt"}).out, "[9, 6, 8]\n");
  EXPECT_EQ(run({"--tokenizer=.", "a.txt", "--special=false"}).out, "[6, 8]\n");
}

TEST_F(Tokenize, KeepsDocumentsApartAndMarksTheirPrompts) {
  put_end_first();
  folder_.write("d.jsonl",
                "{\"ask\": \"abc\", \"say\": \"ab\"}\n{\"say\": \"cd\", \"ask\": \"\"}\n");
  const Outcome outcome = run(
      {"--tokenizer=.", "--prompt", "ask", "--field=say", "--end=<e>", "--out=all.bin", "d.jsonl"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"7 tokens of 32 bits, 2 only read, documents apart in ",
                                "all.bin: 2 documents, 7 bytes, "}));
  const tools::TokenFile tokens(folder_ / "all.bin");
  EXPECT_EQ(tokens.document_ends(), (std::vector<std::int64_t>{4, 7}));
  Ids targets(7);
  tokens.read_targets(0, 10, targets);
  EXPECT_EQ(tokens_of(folder_ / "all.bin", 10), (Ids{9, 6, 5, 9, 9, 7, 9}));
  EXPECT_EQ(targets, (Ids{tools::kMasked, tools::kMasked, 5, 9, 9, 7, 9}));
  const std::vector<std::string> chats = {"--tokenizer=.", "--template={content}<e>",
                                          "--out=all.bin", "e.jsonl"};
  folder_.write("e.jsonl", R"({"messages": [{"role": "user", "content": "abc"},)"
                           R"( {"role": "assistant", "content": "cd"}]})");
  EXPECT_TRUE(has(run(chats).out, {"5 tokens of 32 bits, 3 only read, documents apart in "}));
  EXPECT_EQ(tokens_of(folder_ / "all.bin", 10), (Ids{9, 6, 9, 7, 9}));
  // Without prompts.
  EXPECT_EQ(
      run({"--tokenizer=.", "--documents", "--field=say", "--out=all.bin", "d.jsonl"}).exit_code,
      0);
  EXPECT_EQ(tools::TokenFile(folder_ / "all.bin").document_ends(),
            (std::vector<std::int64_t>{2, 4}));
}

TEST_F(Tokenize, AFileIsReplacedAsAWholeOrNotAtAll) {
  folder_.write("all.bin", "old");
  const Outcome outcome = run({"--tokenizer=.", "--out=all.bin", "a.txt", "missing.txt"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"error: ", "missing.txt"}));
  EXPECT_EQ(folder_.read("all.bin"), "old");
  EXPECT_EQ(run({"--tokenizer=.", "--out=all.bin", "b.txt"}).exit_code, 1);
  EXPECT_EQ(folder_.read("all.bin"), "old");
}

TEST_F(Tokenize, WhatCannotBeHonouredIsRefused) {
  struct Case {
    std::vector<std::string> arguments;
    const char* what;
  };
  const Case cases[] = {
      {{"a.txt"}, "got no tokenizer"},
      {{"--tokenizer=."}, "got no files"},
      {{"--tokenizer=.", "c.jsonl"}, "a text at key text, got none"},
      {{"--tokenizer=.", "--field=x", "a.txt"}, "expected a .jsonl with --field"},
      {{"--tokenizer=.", "--template={content}", "--out=a.bin", "c.jsonl"},
       "a list of messages at key messages, got none"},
      {{"--tokenizer=.", "--out=a.txt", "a.txt"}, "a file called .bin"},
      {{"--tokenizer=.", "--prompt=x", "a.txt"}, "expected a .jsonl with --field"},
      {{"--tokenizer=.", "--field=words", "--prompt=x", "--out=a.bin", "c.jsonl"},
       "a text at key x, got none ("},
      {{"--tokenizer=.", "--documents", "a.txt"}, "expected --out with --documents, or where"},
      {{"--tokenizer=.", "--field=words", "--prompt=x", "--out=a.bin", "c.jsonl", "a.txt"},
       "expected .jsonl alone with --prompt or --template"},
      {{"--tokenizer=.", "--end=no", "a.txt"}, "a token of the tokenizer, got no"},
      {{"--tokenizer=.", "--other", "a.txt"}, "--other"},
      {{"--tokenizer=missing", "a.txt"}, "missing"},
  };
  for (const Case& c : cases) {
    const Outcome outcome = run(c.arguments);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"error: [", c.what}));
    EXPECT_EQ(outcome.out, "");
  }
  const Outcome help = run({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_TRUE(has(help.out, {"--tokenizer", "--out", "--field", "--prompt", "--documents",
                             "--special", "--end"}));
}

TEST_F(Tokenize, TokensAreWrittenWithAsManyBitsAsTheyNeed) {
  const std::string path = folder_ / "wide.bin";
  for (const std::int64_t vocab : {std::int64_t{1} << 16, (std::int64_t{1} << 16) + 1}) {
    tools::TokenWriter writer(vocab);
    const Ids ids = {0, static_cast<std::int32_t>(vocab - 1), 1};
    writer.add(ids);
    writer.write(path);
    EXPECT_EQ(tokens_of(path, vocab), ids);
    EXPECT_EQ(tools::TokenFile(path).token_nbytes(), vocab > 1 << 16 ? 4 : 2);
  }
  tools::TokenWriter writer(10);
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { writer.add(Ids{65536}); }),
                  {"tokens of 16 bits, got 65536"}));
}

}  // namespace
}  // namespace tessera

// Prompts of files, as tokens, and what is said of how they go on.
#include "tools/decoding/prompts.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using testing::error_of;
using testing::has;
using Texts = std::vector<std::string>;
using Ids = std::vector<std::int32_t>;

TEST(Prompts, AreTheLinesOfAFile) {
  const testing::TempFolder folder;
  EXPECT_EQ(read_prompt_file(folder.write("a", "one\r\ntwo words\nthree")),
            (Texts{"one", "two words", "three"}));
  EXPECT_EQ(read_prompt_file(folder.write("b", "one\n")), Texts{"one"});
  const auto refusal = [&](const char* text) {
    const std::string path = folder.write("c", text);
    return error_of<IoError>([&] { read_prompt_file(path); });
  };
  EXPECT_TRUE(has(refusal(""), {"an empty file", "c)"}));
  EXPECT_TRUE(has(refusal("one\n\ntwo\n"), {"an empty line", "c:2)"}));
  EXPECT_TRUE(has(refusal("one\n\r\n"), {"an empty line", "c:2)"}));
  EXPECT_TRUE(has(refusal("\x1f\x8b\x08"), {"expected prompts, got a gzip file: unpack it"}));
  EXPECT_EQ(read_prompt_file(folder.write("d", "<html>\n{\"a\": 1}\n")),
            (Texts{"<html>", "{\"a\": 1}"}));
}

class PromptTokens : public ::testing::Test {
 protected:
  PromptTokens()
      : tokenizer_(
            Tokenizer::read(folder_.write("tokenizer.json", testing::small_tokenizer().dump()))) {}

  PromptReading reading() const { return {.tokenizer = &tokenizer_, .positions = 3, .vocab = 10}; }
  std::vector<Prompt> read(const std::string& lines, const DocumentFields& fields) const {
    return read_prompts(folder_.write("a.jsonl", lines), fields, reading());
  }

  const testing::TempFolder folder_;
  const Tokenizer tokenizer_;
};

TEST_F(PromptTokens, AreThoseOfTheTokenizer) {
  const std::vector<Prompt> prompts = prompts_of({"abc ab", "a"}, reading());
  ASSERT_EQ(prompts.size(), 2u);
  EXPECT_EQ(prompts[0].text, "abc ab");
  EXPECT_EQ(prompts[0].tokens, tokenizer_.encode("abc ab"));
  EXPECT_EQ(prompts[1].tokens, Ids{0});
}

TEST_F(PromptTokens, AreBytesWithoutATokenizer) {
  const std::vector<Prompt> prompts = prompts_of({"A\xff"}, {.positions = 2, .vocab = 256});
  EXPECT_EQ(prompts.at(0).tokens, (Ids{65, 255}));
}

TEST_F(PromptTokens, ThatTheModelCannotReadAreRefused) {
  const auto refusal = [&](const Texts& texts, const PromptReading& r) {
    return error_of<InvalidArgument>([&] { prompts_of(texts, r); });
  };
  EXPECT_TRUE(has(refusal({"a", "a b c d"}, reading()),
                  {"expected a prompt of 1 to 3 tokens, the positions of the model, got ",
                   "(prompt 2: a b c d)"}));
  EXPECT_TRUE(has(refusal({""}, reading()), {"got 0 (prompt 1: )"}));
  PromptReading small = reading();
  small.vocab = 1;
  EXPECT_TRUE(
      has(refusal({"a", "d"}, small), {"a tokenizer of the model's 1 tokens, got token 3"}));
}

// What stands before the answer, whatever answer there is.
// Whatever answer there is.
TEST_F(PromptTokens, OfAJsonlStandBeforeWhatIsLearned) {
  const DocumentFields fields{.text = "say", .prompt = "ask"};
  const std::vector<Prompt> prompts = read(R"({"ask": "ab", "say": "c"})"
                                           "\n\n"
                                           R"({"ask": "d", "say": ""})",
                                           fields);
  ASSERT_EQ(prompts.size(), 2u);
  EXPECT_EQ(prompts[0].tokens, tokenizer_.encode("ab"));
  EXPECT_EQ(prompts[0].text, "ab");
  EXPECT_EQ(prompts[1].tokens, tokenizer_.encode("d"));
}

TEST_F(PromptTokens, OfAChatEndWhereTheLastAnswerBegins) {
  const DocumentFields chat{.text = "messages", .chat = ChatTemplate("d {content}")};
  const auto text = [&](const std::string& messages) {
    PromptReading wide = reading();
    wide.positions = 100;
    const std::string path = folder_.write("b.jsonl", "{\"messages\": [" + messages + "]}\n");
    return read_prompts(path, chat, wide).at(0).text;
  };
  const std::string asked = R"({"role": "user", "content": "a"}, )";
  const std::string answered = R"({"role": "assistant", "content": "b"})";
  EXPECT_EQ(text(asked + answered), "d ad ");
  EXPECT_EQ(text(asked + R"({"role": "assistant", "content": "c a b"})"), "d ad ");
  EXPECT_EQ(text(asked + answered + ", " + asked + answered), "d ad bd ad ");
  EXPECT_EQ(text(asked + asked + R"({"role": "user", "content": "c"})"), "d ad ad c");
}

TEST_F(PromptTokens, OfAJsonlNeedATokenizerAndSomethingToGoOnWith) {
  const DocumentFields text{.text = "text"};
  EXPECT_TRUE(
      has(error_of<IoError>([&] { read("{\"text\": \"ab\"}\n", text); }),
          {"expected something before what is learned, to go on with, got nothing", "a.jsonl:1"}));
  EXPECT_TRUE(has(error_of<IoError>([&] { read("\n", text); }), {"a.jsonl"}));
  const PromptReading bytes{.positions = 3, .vocab = 256};
  EXPECT_TRUE(has(error_of<IoError>([&] { read_prompts(folder_ / "a.jsonl", text, bytes); }),
                  {"for a model whose tokens are bytes, got a .jsonl"}));
}

TEST_F(PromptTokens, AreToldWithWhatFollows) {
  const Prompt prompt = prompts_of({"ab"}, reading()).at(0);
  const Ids more = tokenizer_.encode("abc d");
  Continuation made{more, End::kTokens};
  EXPECT_EQ(text_of(prompt, made, &tokenizer_), "abc d");
  EXPECT_EQ(
      testing::parse_json(record_of(prompt, "abc d", made).text()),
      nlohmann::json({{"prompt", "ab"}, {"text", "abc d"}, {"tokens", more}, {"end", "tokens"}}));
  // The token that ends a text is none of it.
  made.end = End::kEos;
  EXPECT_EQ(text_of(prompt, made, &tokenizer_),
            tokenizer_.decode(Ids(more.begin(), more.end() - 1)));
  EXPECT_EQ(text_of({}, {{65, 10, 66}, End::kTokens}, nullptr), "A\nB");
}

}  // namespace
}  // namespace tessera::tools

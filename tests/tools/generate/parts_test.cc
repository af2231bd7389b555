// Prompts on a command line, the tokens that end a text, and texts that are written in their order.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/generate/eos_tokens.h"
#include "tools/generate/ordered_output.h"
#include "tools/generate/prompt_words.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using testing::error_of;
using testing::has;
using Texts = std::vector<std::string>;

PromptWords words_of(const std::vector<const char*>& arguments) {
  return read_prompt_words(arguments);
}

TEST(Prompts, AreTakenFromTheCommandLine) {
  const PromptWords words =
      words_of({"--from=x", "--prompt=a b", "--prompt", "--c", "--prompts=f", "--prompt="});
  EXPECT_EQ(words.prompts, (Texts{"a b", "--c", ""}));
  EXPECT_EQ(Texts(words.others.begin(), words.others.end()), (Texts{"--from=x", "--prompts=f"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { words_of({"--prompt"}); }), {"no value"}));
}

class EosTokens : public ::testing::Test {
 protected:
  EosTokens() { folder_.write("tokenizer.json", testing::small_tokenizer().dump()); }
  std::set<std::int32_t> read() const {
    return read_eos_tokens(folder_.path(), Tokenizer::read(folder_.path()));
  }
  const testing::TempFolder folder_;
};

TEST_F(EosTokens, AreWhatTheFirstFileSaysThatSaysSomething) {
  EXPECT_EQ(read(), std::set<std::int32_t>{});
  folder_.write("tokenizer_config.json", R"({"eos_token": "<e>"})");
  EXPECT_EQ(read(), std::set{9});
  folder_.write("config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(read(), std::set{9});
  folder_.write("config.json", R"({"eos_token_id": 3})");
  EXPECT_EQ(read(), std::set{3});
  folder_.write("generation_config.json", R"({})");
  EXPECT_EQ(read(), std::set{3});
  folder_.write("generation_config.json", R"({"eos_token_id": [1, 5]})");
  EXPECT_EQ(read(), (std::set{1, 5}));
}

TEST_F(EosTokens, OfAnotherKindAreRefused) {
  for (const char* id : {"-1", "\"a\"", "[1, 2.5]", "[[1]]", "4294967296", "true", "{}"}) {
    folder_.write("config.json", std::string(R"({"eos_token_id": )") + id + "}");
    EXPECT_TRUE(has(error_of<IoError>([&] { read(); }),
                    {"[generate] expected the id of a token", "(eos_token_id, ", "config.json)"}))
        << id;
  }
}

TEST(OrderedOutput, WritesTextsOneAfterTheOther) {
  Texts written;
  OrderedOutput output(3, [&](std::string_view text) {
    written.emplace_back(text);
    return true;
  });
  EXPECT_TRUE(output.add(1, "b"));
  EXPECT_TRUE(output.add(0, "a"));
  EXPECT_EQ(written, Texts{"a"});
  EXPECT_TRUE(output.end(2, "d"));
  EXPECT_TRUE(output.add(1, "c"));
  EXPECT_TRUE(output.end(0, "."));
  EXPECT_EQ(written, (Texts{"a", ".", "bc"}));
  EXPECT_TRUE(output.add(1, ""));
  EXPECT_TRUE(output.end(1, ""));
  EXPECT_EQ(written, (Texts{"a", ".", "bc", "d"}));
}

TEST(OrderedOutput, SaysWhenThereIsNoUseInMore) {
  int calls = 0;
  OrderedOutput output(2, [&](std::string_view) { return ++calls < 2; });
  EXPECT_TRUE(output.add(0, "a"));
  EXPECT_FALSE(output.add(0, "b"));
  EXPECT_FALSE(output.add(1, "c"));
  EXPECT_FALSE(output.end(0, "d"));
  EXPECT_EQ(calls, 2) << "nothing is written after what was not";
}

TEST(OrderedOutput, TextsCommandNoTerminal) {
  EXPECT_EQ(without_commands("a\tb\n\nc\x1b[2J\x07 \r\u00e4"), "a\tb\n\nc\\x1b[2J\\x07 \\r\u00e4");
  EXPECT_EQ(without_commands(""), "");
}

}  // namespace
}  // namespace tessera::tools

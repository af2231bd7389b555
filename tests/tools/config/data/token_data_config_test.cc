#include "tools/config/data/token_data_config.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/cli/flags.h"
#include "tools/config/data/token_source.h"
#include "tools/data/data_fit.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(TokenDataConfig, EveryFlagSetsItsOwnField) {
  TokenDataConfig c;
  FlagSet flags("train", "");
  c.add_to(flags);
  std::ostringstream out;
  ASSERT_TRUE(flags.parse(
      std::vector<const char*>{"--data.path=a.bin", "--data.mix=b.bin:2", "--data.format=uint32",
                               "--data.order=sequential", "--data.val_fraction=0.25",
                               "--data.packing", "--data.field=f", "--data.prompt=p",
                               "--data.template={content}", "--data.loss=all",
                               "--data.special=false", "--data.end=<e>", "--data.tokenizer=t"},
      out));
  EXPECT_EQ(c.path, "a.bin");
  EXPECT_EQ(c.mix, "b.bin:2");
  EXPECT_EQ(c.format, TokenFormat::kUInt32);
  EXPECT_EQ(c.order, SampleOrder::kSequential);
  EXPECT_EQ(c.val_fraction, 0.25);
  EXPECT_TRUE(c.packing);
  EXPECT_EQ(c.documents, (DocumentConfig{.field = "f",
                                         .prompt = "p",
                                         .chat_template = "{content}",
                                         .loss = LearnedPart::kAll,
                                         .special = false,
                                         .end = "<e>"}));
  EXPECT_EQ(c.tokenizer, "t");
}

class Jsonl : public ::testing::Test {
 protected:
  Jsonl() {
    c_.path = folder_.write("a.jsonl", R"({"text": "abc", "ask": "cd"})"
                                       "\n"
                                       R"({"text": "ab", "ask": "a"})"
                                       "\n");
    c_.val_fraction = 0;
    c_.tokenizer = folder_.write("tokenizer.json", testing::small_tokenizer().dump());
    folder_.write("tokenizer_config.json", R"({"eos_token": "<e>"})");
  }
  std::vector<std::int32_t> targets() const {
    const TokenFile file = c_.open(c_.sources()[0], c_.read_tokenizer(""));
    std::vector<std::int32_t> all(static_cast<std::size_t>(file.num_tokens()));
    file.read_targets(0, 10, all);
    return all;
  }
  std::string error() const {
    return error_of<engine::Error>(
        [&] { c_.dataset(c_.fit(10, ""), 4, 1, c_.read_tokenizer("")); });
  }

  const TempFolder folder_;
  TokenDataConfig c_;
};

constexpr std::int32_t kRead = kMasked;

TEST_F(Jsonl, IsTokenizedAsItsOptionsSay) {
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(targets(), (Ids{6, 9, 5, 9}));
  c_.documents.end = "none";
  EXPECT_EQ(targets(), (Ids{6, 5}));
  c_.documents.end = "cd";
  EXPECT_EQ(targets(), (Ids{6, 7, 5, 7}));
  c_.documents.prompt = "ask";
  EXPECT_EQ(targets(), (Ids{kRead, 6, 7, kRead, 5, 7}));
  c_.documents.loss = LearnedPart::kAll;
  EXPECT_EQ(targets(), (Ids{7, 6, 7, 0, 5, 7})) << "aab is a and ab";
  c_.documents = {.field = "ask"};
  EXPECT_EQ(targets(), (Ids{7, 9, 0, 9}));
  c_.path = folder_.write("b.jsonl", R"({"messages": [{"role": "a", "content": "b"},)"
                                     R"( {"role": "assistant", "content": "cd"}]})");
  c_.documents = {.chat_template = "{content}<e>"};
  EXPECT_EQ(targets(), (Ids{kRead, kRead, 7, 9})) << "no end but the template's";
}

// Of a tokenizer that ends texts itself.
TEST_F(Jsonl, AnEndIsNotThereTwice) {
  folder_.write("tokenizer.json", testing::small_tokenizer_with_end(/*is_first=*/false).dump());
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(targets(), (Ids{6, 9, 5, 9}));
  c_.documents.special = false;
  EXPECT_EQ(targets(), (Ids{6, 9, 5, 9}));
  c_.documents.end = "none";
  EXPECT_EQ(targets(), (Ids{6, 5}));
}

// As the run does, though it reads no line.
TEST_F(Jsonl, IsRefusedByAPlanAsByARun) {
  const auto planned = [&] {
    return error_of<engine::Error>([&] { c_.check_heads(c_.fit(10, "")); });
  };
  const std::string path = c_.path, tokenizer = c_.tokenizer;
  c_.documents.end = "nothing";
  EXPECT_TRUE(has(planned(), {"a token of the tokenizer, got nothing (data.end)"}));
  c_.documents = {};
  c_.tokenizer = folder_ / "none";
  EXPECT_TRUE(has(planned(), {folder_ / "none"}));
  c_.tokenizer = "";
  EXPECT_TRUE(has(planned(), {"the tokenizer of the texts in a .jsonl, got none"}));
  // A model's folder that says nothing of its tokens.
  c_.mix = c_.path + ":1," + folder_.write("b.txt", "some text of bytes, and some more") + ":1";
  c_.path = "";
  EXPECT_TRUE(has(error_of<engine::Error>([&] { c_.check_heads(c_.fit(10, folder_ / "none")); }),
                  {"sources of one kind of tokens", "b.txt", "a.jsonl"}));
  c_.tokenizer = tokenizer;
  EXPECT_TRUE(c_.check_heads(c_.fit(10, "")).empty());
}

TEST_F(Jsonl, KeepsDocumentsApart) {
  const TokenMix data = c_.dataset(c_.fit(10, ""), 4, 1, c_.read_tokenizer(""));
  EXPECT_TRUE(data.keeps_documents());
  EXPECT_EQ(data.num_sequences(), 2);
  EXPECT_TRUE(c_.keeps_documents());
  EXPECT_TRUE(c_.files_if_there().empty()) << "planning does not tokenize";
  c_.packing = true;
  EXPECT_TRUE(c_.check_heads(c_.fit(10, "")).empty());
  EXPECT_EQ(c_.dataset(c_.fit(10, ""), 4, 1, c_.read_tokenizer("")).num_sequences(), 1);
  c_.packing = false;
  c_.format = TokenFormat::kBytes;
  c_.tokenizer = "";
  EXPECT_FALSE(c_.keeps_documents());
  EXPECT_TRUE(c_.dataset(c_.fit(256, ""), 4, 1).is_bytes());
}

TEST_F(Jsonl, WhatCannotBeHonouredIsRefused) {
  c_.documents = {.prompt = "ask", .chat_template = "{content}"};
  EXPECT_TRUE(has(error(), {"a template or a prompt, got both"}));
  c_.documents = {.chat_template = "{role}"};
  EXPECT_TRUE(has(error(), {"{content} once, got it 0 times in {role}", "(data.template)"}));
  c_.documents = {.prompt = "text"};
  EXPECT_TRUE(has(error(), {"another key than the text, got text for both (data.prompt)"}));
  c_.documents = {.loss = LearnedPart::kAll};
  EXPECT_TRUE(has(error(), {"a prompt or a template with loss=all", "(data.loss)"}));
  c_.documents = {.end = "nothing"};
  EXPECT_TRUE(has(error(), {"a token of the tokenizer, got nothing (data.end)"}));
  c_.documents = {};
  folder_.write("tokenizer_config.json", "{}");
  EXPECT_TRUE(has(error(), {"an eos_token in tokenizer_config.json", "got none"}));
  c_.documents.end = "none";
  EXPECT_TRUE(has(error(), {"some token after the first is learned"})) << "of one token each";
  EXPECT_TRUE(has(
      error_of<engine::IoError>([&] { c_.dataset(c_.fit(6, ""), 4, 1, c_.read_tokenizer("")); }),
      {"tokens below the vocabulary of 6, got 6 at position 0", "a.jsonl"}));
  c_.tokenizer = "";
  EXPECT_TRUE(has(error(), {"the tokenizer of the texts in a .jsonl, got none", "a.jsonl"}));
  c_.path = folder_.write("a.txt", "some text of bytes");
  EXPECT_TRUE(has(error(), {"expected a text and its tokenizer", "data.end", "got ", "a.txt"}));
  c_.documents = {.field = "ask"};
  EXPECT_TRUE(has(error(), {"expected a .jsonl in data.path", "data.field", "got ", "a.txt"}));
  c_.documents = {};
  c_.tokenizer = folder_ / "tokenizer.json";
  c_.format = TokenFormat::kBytes;
  EXPECT_TRUE(has(error(), {"no tokenizer of data whose tokens are bytes", "a.txt"}));
}

// "abc ab cd" is abc (6), the space with ab (8), a space (4) and cd (7).
class Text : public Jsonl {
 protected:
  Text() { c_.path = folder_.write("a.txt", "abc ab cd"); }
};

TEST_F(Text, IsOneLongTextOfItsTokenizer) {
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(targets(), (Ids{6, 8, 4, 7})) << "nothing comes after it";
  folder_.write("tokenizer_config.json", "{}");
  EXPECT_EQ(targets(), (Ids{6, 8, 4, 7})) << "so an eos_token is not asked for";
  c_.documents.end = "<e>";
  EXPECT_EQ(targets(), (Ids{6, 8, 4, 7, 9}));
  folder_.write("tokenizer.json", testing::small_tokenizer_with_end(/*is_first=*/true).dump());
  EXPECT_EQ(targets(), (Ids{9, 6, 8, 4, 7, 9}));
  c_.documents = {.special = false};
  EXPECT_EQ(targets(), (Ids{6, 8, 4, 7}));
}

// As a .bin of the same tokens.
TEST_F(Text, HasSequencesForValidation) {
  std::string text;
  for (int i = 0; i < 10; ++i) text += "abc ab cd";  // 4 tokens
  c_.path = folder_.write("a.txt", text);
  c_.val_fraction = 0.25;
  const TokenMix data = c_.dataset(c_.fit(10, ""), 5, 1, c_.read_tokenizer(""));
  EXPECT_FALSE(data.keeps_documents());
  EXPECT_FALSE(data.is_bytes());
  EXPECT_EQ(data.num_sequences(), 6) << "39 / 5, of which a quarter is kept";
  EXPECT_EQ(data.num_val_sequences(), 1);
  EXPECT_FALSE(c_.keeps_documents());
  EXPECT_TRUE(c_.check_heads(c_.fit(10, "")).empty());
  EXPECT_TRUE(mix_warnings(data, c_.fit(10, ""), true).empty());
  EXPECT_EQ(c_.tokens_nbytes(""), 6 * 90);
  c_.path = folder_.write("short.txt", "abc");
  EXPECT_TRUE(has(error(), {"at least 5 tokens for a sequence of 4", "got 1", "short.txt"}));
}

TEST_F(Text, IsBytesWithoutATokenizerOrIfAskedFor) {
  c_.tokenizer = "";
  EXPECT_FALSE(c_.tokenizes(""));
  EXPECT_FALSE(c_.tokenizes(folder_ / "none"));
  EXPECT_EQ(c_.tokens_nbytes(""), 0);
  EXPECT_TRUE(c_.dataset(c_.fit(256, ""), 4, 1).is_bytes());
  EXPECT_TRUE(c_.tokenizes(folder_.path())) << "that of a model";
  EXPECT_EQ(c_.dataset(c_.fit(10, folder_.path()), 3, 1, c_.read_tokenizer(folder_.path()))
                .num_sequences(),
            1);
  c_.path = "";
  EXPECT_TRUE(c_.tokenizes(folder_.path())) << "of the text that Bazel supplies";
  c_.format = TokenFormat::kBytes;
  EXPECT_FALSE(c_.tokenizes(folder_.path()));
}

TEST_F(Text, IsMixedWithLines) {
  c_.mix = c_.path + ":1," + (folder_ / "a.jsonl") + ":3";
  c_.path = "";
  const TokenMix data = c_.dataset(c_.fit(10, ""), 3, 1, c_.read_tokenizer(""));
  EXPECT_EQ(data.quotas(), (std::vector<std::int64_t>{1024, 3072}));
  EXPECT_EQ(data.num_sequences(), 1 + 2);
  EXPECT_TRUE(data.keeps_documents());
  EXPECT_TRUE(c_.keeps_documents());
  EXPECT_EQ(c_.tokens_nbytes(""), 2 * (9 + 56) + 4 * 9);
}

TEST_F(Text, WhatIsOddOfItIsSaidOrRefused) {
  c_.path = folder_.write("latin.txt",
                          "abc\xdf"
                          " ab cd");
  const TokenMix data = c_.dataset(c_.fit(10, ""), 3, 1, c_.read_tokenizer(""));
  const std::vector<std::string> lines = mix_warnings(data, c_.fit(10, ""), true);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(has(lines[0], {"latin.txt is not UTF-8", "iconv"}));
  const auto planned = [&] {
    return error_of<engine::Error>([&] { c_.check_heads(c_.fit(10, "")); });
  };
  const std::pair<std::string, std::string> cases[] = {{"\xff\xfe"
                                                        "a",
                                                        "UTF-16"},
                                                       {std::string("ab\0cd", 5), "a binary file"},
                                                       {"{\"a\": 1}", "JSON"},
                                                       {"", "an empty file"}};
  for (const auto& [text, words] : cases) {
    c_.path = folder_.write("odd.txt", text);
    EXPECT_TRUE(has(error(), {words, "odd.txt"}));
    EXPECT_TRUE(has(planned(), {words, "odd.txt"}));
  }
  c_.path = folder_.write("a.txt", "abc ab cd");
  c_.packing = true;
  EXPECT_TRUE(has(error(), {"documents to pack, got text", "a.txt"}));
  EXPECT_TRUE(has(planned(), {"documents to pack, got text", "a.txt"}));
}

TEST(TokenDataConfig, AMixIsFilesWithWeights) {
  const std::vector<TokenSource> sources = parse_mix("/a.bin:0.7,/b:c.txt:3e-1");
  ASSERT_EQ(sources.size(), 2U);
  EXPECT_EQ(sources[0].path, "/a.bin");
  EXPECT_EQ(sources[0].weight, 0.7);
  EXPECT_EQ(sources[1].path, "/b:c.txt");
  EXPECT_EQ(sources[1].weight, 0.3);
  EXPECT_EQ(mix_option(sources), "/a.bin:0.7,/b:c.txt:0.3");
  for (const char* bad : {"/a.bin", "/a.bin:", ":1", "/a:0", "/a:-1", "/a:nan", "/a:inf", "/a:1x",
                          "/a:1,", ",/a:1", "/a:1,,/b:1", "/a:1 ,/b:1", "/a: 1"}) {
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { parse_mix(bad); }),
                    {"expected FILE:WEIGHT", bad, "data.mix"}))
        << bad;
  }
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([] { parse_mix("/a:1,/b:1,/a:2"); }),
                  {"a file once, got /a twice", "data.mix"}));
  EXPECT_THROW(parse_mix("/a:1,/b:1e-9"), engine::InvalidArgument);
}

TEST(TokenDataConfig, SourcesAreAPathOrAMix) {
  const TempFolder folder;
  TokenDataConfig c;
  EXPECT_TRUE(c.given_sources().empty());
  c.mix = folder.write("a.txt", "some text") + ":3," + folder.write("b.txt", "other text") + ":1";
  ASSERT_EQ(c.sources().size(), 2U);
  EXPECT_EQ(c.run_files(c.sources())[1].option, "data.mix");
  EXPECT_EQ(c.files_if_there().size(), 2U);
  c.val_fraction = 0;
  const TokenMix data = c.dataset(c.fit(256, ""), 4, 1);
  EXPECT_EQ(data.quotas(), (std::vector<std::int64_t>{3072, 1024}));
  EXPECT_EQ(data.num_sequences(), 2 + 2);
  c.path = folder / "a.txt";
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { c.sources(); }),
                  {"expected data.path or data.mix, got both"}));
  c.mix = "";
  EXPECT_EQ(c.sources()[0].path, c.path);
  EXPECT_EQ(c.run_files(c.sources())[0].option, "data.path");
  c.path = folder / "missing.txt";
  EXPECT_EQ(c.files_if_there().size(), 0U);
}

// Two sources of one size would go hand in hand otherwise.
TEST(TokenDataConfig, EachSourceHasAnOrderOfItsOwn) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 201; ++i) text += static_cast<char>('a' + i * i % 23);
  TokenDataConfig c;
  c.val_fraction = 0;
  c.mix = folder.write("a.txt", text) + ":1," + folder.write("b.txt", text) + ":1";
  const TokenMix data = c.dataset(c.fit(256, ""), 2, 1);
  std::vector<std::int32_t> tokens[2] = {std::vector<std::int32_t>(200),
                                         std::vector<std::int32_t>(200)};
  std::vector<std::int32_t> targets(200);
  for (std::size_t i : {0, 1}) data.sources()[i].batch(0, 100, tokens[i], targets);
  EXPECT_NE(tokens[0], tokens[1]);
}

TEST(TokenDataConfig, PackingNeedsDocuments) {
  const TempFolder folder;
  TokenDataConfig c;
  c.path = folder.write("a.txt", "text, in which nothing is a document");
  c.val_fraction = 0;
  EXPECT_EQ(c.dataset(c.fit(256, ""), 4, 1).num_sequences(), 8);
  c.packing = true;
  EXPECT_TRUE(
      has(error_of<engine::InvalidArgument>([&] { c.dataset(c.fit(256, ""), 4, 1); }),
          {"expected documents to pack, got text", "//tools:tokenize", "data.packing", "a.txt"}));
}

}  // namespace
}  // namespace tessera::tools

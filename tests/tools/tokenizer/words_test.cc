// Texts to ids and back through a small file: words, spaces, added tokens, decoders, streams.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/split.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::small_tokenizer;
using Ids = std::vector<std::int32_t>;

Tokenizer made(const json& file) {
  const testing::TempFolder folder;
  return Tokenizer::read(folder.write("tokenizer.json", file.dump()));
}

json added(std::int32_t id, const char* content, const char* flag) {
  json token = {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", false}};
  if (*flag != '\0') token[flag] = true;
  return token;
}

// The text "a--b-": matches are the hyphens.
TEST(Split, JoinsMatchesAsTheBehaviorSays) {
  const std::vector<Part> parts = {
      {{0, 1}, false}, {{1, 2}, true}, {{2, 3}, true}, {{3, 4}, false}, {{4, 5}, true}};
  const auto ends = [&](SplitBehavior behavior) {
    std::string text;
    for (const Regex::Range& range : joined(parts, behavior)) {
      text += std::string_view("a--b-").substr(range.begin, range.end - range.begin);
      text += ' ';
    }
    return text;
  };
  EXPECT_EQ(ends(SplitBehavior::kRemoved), "a b ");
  EXPECT_EQ(ends(SplitBehavior::kIsolated), "a - - b - ");
  EXPECT_EQ(ends(SplitBehavior::kMergedWithPrevious), "a- - b- ");
  EXPECT_EQ(ends(SplitBehavior::kMergedWithNext), "a - -b - ");
  EXPECT_EQ(ends(SplitBehavior::kContiguous), "a -- b - ");
}

TEST(Tokenizer, WordsAreMergedAndNotAcrossTheirEnds) {
  const Tokenizer tokenizer = made(small_tokenizer());
  EXPECT_EQ(tokenizer.vocab_size(), 10);
  EXPECT_EQ(tokenizer.encode("abcd abcd abd cd"), (Ids{6, 3, 4, 6, 3, 8, 3, 4, 7}));
  EXPECT_EQ(tokenizer.encode("a<e>b"), (Ids{0, 9, 1}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  EXPECT_EQ(tokenizer.id_of("abc"), 6);
  EXPECT_FALSE(tokenizer.id_of("abcd").has_value());
  EXPECT_EQ(tokenizer.decode(Ids{6, 9, 8}), "abc ab");
  EXPECT_EQ(tokenizer.decode(Ids{6, 9, 8}, false), "abc<e> ab");
}

TEST(Tokenizer, APrefixSpaceIsPutBeforeEveryTextBetweenTokens) {
  json file = small_tokenizer();
  file["pre_tokenizer"]["add_prefix_space"] = true;
  const Tokenizer tokenizer = made(file);
  EXPECT_EQ(tokenizer.encode("ab<e>ab<e> ab"), (Ids{8, 9, 8, 9, 8}));
}

TEST(Tokenizer, AddedTokensTakeSpaceAndStandAloneAsTheirFlagsSay) {
  json file = small_tokenizer();
  file["added_tokens"] = {added(9, "<e>", "lstrip"), added(10, "<r>", "rstrip"),
                          added(11, "dd", "single_word"), added(12, "<e><e>", "")};
  const Tokenizer tokenizer = made(file);
  EXPECT_EQ(tokenizer.encode("a \t<e> b"), (Ids{0, 9, 4, 1}));
  EXPECT_EQ(tokenizer.encode("a <r> \u00a0b"), (Ids{0, 4, 10, 1}));
  // Both take the space between them; it is the first one's.
  EXPECT_EQ(tokenizer.encode("<r>  <e>a"), (Ids{10, 9, 0}));
  EXPECT_EQ(tokenizer.encode("dd add dda dd"), (Ids{11, 4, 0, 3, 3, 4, 3, 3, 0, 4, 11}));
  // The longest one is found.
  EXPECT_EQ(tokenizer.encode("<e><e><e>"), (Ids{12, 9}));
}

TEST(Tokenizer, NormalizedTokensAreFoundInTheNormalizedText) {
  json file = small_tokenizer();
  file["normalizer"] = {{"type", "NFKC"}};
  file["added_tokens"] = {added(9, "\uff41\uff44", "normalized"), added(10, "\uff42", "")};
  const Tokenizer tokenizer = made(file);
  EXPECT_EQ(tokenizer.encode("ad\uff44\uff41\uff44\uff42b"), (Ids{9, 3, 9, 10, 1}));
  EXPECT_EQ(tokenizer.decode(Ids{9, 10}), "ad\uff42");
}

// Two of them can make 10 GB of one letter.
TEST(Tokenizer, AReplaceMakesNoTextThatIsTooLong) {
  RegexScratch scratch;
  const Regex regex("a", "file: normalizer");
  const std::string with(1000, 'a');
  EXPECT_EQ(replaced("bab", regex, with, scratch, 1002), "b" + with + "b");
  // A match, and what is between.
  for (const char* text : {"aaa", "babb"}) {
    EXPECT_TRUE(testing::has(
        testing::error_of<engine::IoError>([&] { replaced(text, regex, with, scratch, 1002); }),
        {"[tokenizer] expected a text of at most 1002 bytes", "(file: normalizer)"}));
  }
}

// U+08CF, which Unicode 14 added, is a mark that would go before the acute.
TEST(Tokenizer, NormalFormsAreThoseOfUnicode9) {
  json file = small_tokenizer();
  file["model"]["vocab"] = {{"\u00e1", 0}, {"b", 1},      {"\u0301", 2}, {"\u08cf", 3},
                            {"\u0323", 4}, {"\u1ea1", 5}, {"a", 6}};
  file["model"]["merges"] = json::array();
  file["added_tokens"] = json::array();
  file["pre_tokenizer"] = nullptr;
  file["normalizer"] = {{"type", "NFC"}};
  EXPECT_EQ(made(file).encode("a\u0301b\u0301\u08cfa\u0301\u0323"), (Ids{0, 1, 2, 3, 5, 2}));
  file["normalizer"]["type"] = "NFD";
  EXPECT_EQ(made(file).encode("\u00e1b\u0301\u08cfb\u0301\u0323"), (Ids{6, 2, 1, 2, 3, 1, 4, 2}));
}

TEST(Tokenizer, TemplatesPutTokensAroundATextUnlessTheyAreNotWanted) {
  json file = small_tokenizer();
  const json single = {{{"SpecialToken", {{"id", "<e>"}, {"type_id", 0}}}},
                       {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                       {{"SpecialToken", {{"id", "two"}, {"type_id", 0}}}}};
  file["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", single},
                            {"pair", json::array()},
                            {"special_tokens",
                             {{"<e>", {{"id", "<e>"}, {"ids", {9}}, {"tokens", {"<e>"}}}},
                              {"two", {{"id", "two"}, {"ids", {2, 3}}, {"tokens", {"c", "d"}}}}}}};
  const Tokenizer tokenizer = made(file);
  EXPECT_EQ(tokenizer.encode("ab"), (Ids{9, 5, 2, 3}));
  EXPECT_EQ(tokenizer.encode(""), (Ids{9, 2, 3}));
  EXPECT_EQ(tokenizer.encode("ab", false), (Ids{5}));
}

TEST(Tokenizer, DigitsAreWordsAloneOrTogether) {
  json file = small_tokenizer();
  file["model"]["vocab"] = {{"1", 0},       {"2", 1}, {"12", 2}, {"\u00bd", 3},
                            {"1\u00bd", 4}, {"x", 5}, {"x1", 6}};
  file["model"]["merges"] = {"x 1", "1 2", "1 \u00bd"};
  file["added_tokens"] = json::array();
  file["pre_tokenizer"] = {{"type", "Digits"}, {"individual_digits", false}};
  EXPECT_EQ(made(file).encode("x12x1\u00bd"), (Ids{5, 2, 5, 4}));
  file["pre_tokenizer"]["individual_digits"] = true;
  EXPECT_EQ(made(file).encode("x12x1\u00bd"), (Ids{5, 0, 1, 5, 0, 3}));
}

// Of Llama 2's kind: byte N is token 3 + N.
Tokenizer of_bytes_and_words() {
  json file = small_tokenizer();
  file["normalizer"] = json::parse(R"({"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})");
  file["pre_tokenizer"] = nullptr;
  file["decoder"] = json::parse(R"({"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
      {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
  file["model"]["byte_fallback"] = true;
  json& vocab = file["model"]["vocab"];
  vocab = {{"▁", 0}, {"a", 1}, {"▁a", 2}};
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
    vocab[name] = 3 + byte;
  }
  file["model"]["merges"] = {"▁ a"};
  file["added_tokens"] = {added(259, "<e>", "special")};
  return made(file);
}

TEST(Tokenizer, BytesWithoutACharacterBecomeTextAgain) {
  const Tokenizer tokenizer = of_bytes_and_words();
  const Ids ids = tokenizer.encode("a a\u20ac\n<e>a");
  EXPECT_EQ(ids, (Ids{2, 2, 3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + '\n', 259, 2}));
  EXPECT_EQ(tokenizer.decode(ids), "a a\u20ac\n a");
  // Each byte of what is no character.
  EXPECT_EQ(tokenizer.decode(Ids{1, 3 + 0xE2, 3 + 0x82, 1}), "a\ufffd\ufffda");
}

TEST(Tokenizer, TokensWithoutADecoderHaveSpacesBetweenThem) {
  json file = small_tokenizer();
  file["decoder"] = nullptr;
  EXPECT_EQ(made(file).decode(Ids{6, 7}), "abc cd");
}

TEST(StreamDecoder, HoldsBackWhatIsNotWhole) {
  json file = small_tokenizer();
  json& vocab = file["model"]["vocab"];
  file["model"]["merges"] = json::array();
  vocab = {{"a", 0}, {"Ġ", 1}, {"â", 2}, {"Ĥ", 3}, {"¬", 4}};
  file["added_tokens"] = {added(5, "<e>", "special")};
  const Tokenizer tokenizer = made(file);
  const Ids ids = tokenizer.encode("a \u20aca");
  EXPECT_EQ(ids, (Ids{0, 1, 2, 3, 4, 0}));
  StreamDecoder stream(tokenizer);
  std::vector<std::string> parts;
  for (const std::int32_t id : ids) parts.push_back(stream.next(id));
  EXPECT_EQ(parts, (std::vector<std::string>{"a", " ", "", "", "\u20ac", "a"}));
  EXPECT_EQ(stream.next(5), "");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(stream.next(2), "");
  EXPECT_EQ(stream.finish(), "\ufffd");
}

Ids bytes_of(std::string_view text) {
  Ids ids;
  for (const char byte : text) ids.push_back(3 + static_cast<unsigned char>(byte));
  return ids;
}

// What each id adds, and the end.
std::vector<std::string> parts_of(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder stream(tokenizer);
  std::vector<std::string> parts;
  for (const std::int32_t id : ids) parts.push_back(stream.next(id));
  parts.push_back(stream.finish());
  return parts;
}

TEST(StreamDecoder, ByteTokensAreTextInRuns) {
  using Parts = std::vector<std::string>;
  const Tokenizer tokenizer = of_bytes_and_words();
  Ids ids = bytes_of("\U0001F600\n");
  ids.push_back(2);
  EXPECT_EQ(parts_of(tokenizer, ids), (Parts{"", "", "", "\U0001F600", "\n", " a", ""}));
  EXPECT_EQ(parts_of(tokenizer, bytes_of("\U0001F600\U0001F601")),
            (Parts{"", "", "", "\U0001F600", "", "", "", "\U0001F601", ""}));
  std::string text;
  Parts expected;
  for (int i = 0; i < 30; ++i) {
    text += "\u0905";
    for (const char* part : {"", "", "\u0905"}) expected.emplace_back(part);
  }
  expected.emplace_back("");
  EXPECT_EQ(parts_of(tokenizer, bytes_of(text)), expected);
  // A special token that is left out ends no run.
  ids = bytes_of("\u20ac");
  ids.insert(ids.begin() + 1, 259);
  EXPECT_EQ(parts_of(tokenizer, ids), (Parts{"", "", "", "\u20ac", ""}));
}

TEST(StreamDecoder, WhatIsNoTextIsReplacedAndNotHeldForEver) {
  const Tokenizer tokenizer = of_bytes_and_words();
  // A run that was text becomes none.
  Ids ids = bytes_of("\U0001F600\xFF");
  EXPECT_EQ(engine::join(parts_of(tokenizer, ids), ""), "\U0001F600\ufffd");
  ids.push_back(2);
  EXPECT_EQ(engine::join(parts_of(tokenizer, ids), ""), "\U0001F600\ufffd a");
  ids = bytes_of(std::string(100, '\xFF'));
  ids.push_back(2);
  const std::vector<std::string> parts = parts_of(tokenizer, ids);
  EXPECT_EQ(engine::join(parts, ""), tokenizer.decode(ids));
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_EQ(parts[i].empty(), i % 16 != 15) << i;
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    ids.clear();
    for (int i = 0; i < 100; ++i) ids.push_back(static_cast<std::int32_t>(random() % 260));
    for (const std::string& part : parts_of(tokenizer, ids)) EXPECT_TRUE(engine::is_utf8(part));
  }
}

// Which could be bytes that are not whole, and are a character.
TEST(StreamDecoder, GoesOnAfterManyReplacements) {
  json file = small_tokenizer();
  file["model"]["merges"] = json::array();
  file["model"]["vocab"] = {{"ï", 0}, {"¿", 1}, {"½", 2}, {"â", 3}, {"Ĥ", 4}, {"¬", 5}};
  file["added_tokens"] = json::array();
  const Tokenizer tokenizer = made(file);
  std::string text;
  for (int i = 0; i < 30; ++i) text += "\ufffd";
  text += "\u20ac";
  StreamDecoder stream(tokenizer);
  std::string all;
  for (const std::int32_t id : tokenizer.encode(text)) all += stream.next(id);
  EXPECT_EQ(all, text);
  EXPECT_EQ(stream.finish(), "");
}

}  // namespace
}  // namespace tessera::tools

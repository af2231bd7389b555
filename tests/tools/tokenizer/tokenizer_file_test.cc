// What is read from files of tokenizers, and what is refused, by file and key.
#include "tools/tokenizer/tokenizer_file.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::small_tokenizer;
using Ids = std::vector<std::int32_t>;

class TokenizerFile : public ::testing::Test {
 protected:
  std::string error_of_text(std::string_view text) const {
    const std::string path = folder_.write("tokenizer.json", text);
    return error_of<IoError>([&] { Tokenizer::read(path); });
  }

  /// The error when the value at `pointer` is `value`, which names the file.
  std::string error_with(const char* pointer, const json& value) const {
    json file = small_tokenizer();
    file[json::json_pointer(pointer)] = value;
    std::string error = error_of_text(file.dump());
    EXPECT_TRUE(has(error, {"[tokenizer] expected ", folder_ / "tokenizer.json"})) << pointer;
    return error;
  }

  const testing::TempFolder folder_;
};

TEST_F(TokenizerFile, WhatIsNotKnownIsRefusedByNameAndKey) {
  struct Case {
    const char* pointer;
    json value;
    std::initializer_list<std::string_view> parts;
  };
  const json type = {{"type", "Other"}};
  const Case cases[] = {
      {"/more", 1, {": more)", "got 1"}},
      {"/version", "2.0", {"expected 1.0, got \"2.0\"", ": version)"}},
      {"/truncation", json::object(), {"expected null", ": truncation)"}},
      {"/padding", json::object(), {"expected null", ": padding)"}},
      {"/model/type", "WordPiece", {"expected BPE, got \"WordPiece\"", ": model.type)"}},
      {"/model/dropout", 0.1, {"expected none, got 0.1", ": model.dropout)"}},
      {"/model/continuing_subword_prefix", "##", {": model.continuing_subword_prefix)"}},
      {"/model/end_of_word_suffix", "</w>", {": model.end_of_word_suffix)"}},
      {"/model/unk_token", "no", {"a token of the vocabulary", ": model.unk_token)"}},
      {"/model/fuse_unk", 1, {"true or false, got 1", ": model.fuse_unk)"}},
      {"/model/other", 1, {": model.other)"}},
      {"/normalizer", type, {"NFC, NFD, NFKC", "\"Other\"", ": normalizer.type)"}},
      {"/normalizer", 7, {"an object, got 7", ": normalizer)"}},
      {"/pre_tokenizer", type, {"ByteLevel, Split", "\"Other\"", ": pre_tokenizer.type)"}},
      {"/pre_tokenizer/other", true, {": pre_tokenizer.other)"}},
      {"/post_processor", type, {"TemplateProcessing", ": post_processor.type)"}},
      {"/decoder", type, {"ByteFallback", "\"Other\"", ": decoder.type)"}},
      {"/added_tokens/0/other", 1, {": added_tokens[0].other)"}},
  };
  for (const Case& c : cases) EXPECT_TRUE(has(error_with(c.pointer, c.value), c.parts));
}

TEST_F(TokenizerFile, StepsOfASequenceAreRefusedByTheirPlace) {
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  const json bytes = {{"type", "ByteLevel"}};
  EXPECT_TRUE(
      has(error_with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {bytes, digits}}}),
          {"nothing after ByteLevel", ": pre_tokenizer.pretokenizers[1])"}));
  EXPECT_TRUE(has(
      error_with("/normalizer",
                 {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "Nmt"}}}}}),
      {": normalizer.normalizers[1].type)"}));
  const auto split = [](const json& pattern, const char* behavior) -> json {
    return {{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}};
  };
  EXPECT_TRUE(has(error_with("/pre_tokenizer", split({{"Regex", "("}}, "Removed")),
                  {"a regular expression, got (", ": pre_tokenizer.pattern.Regex)"}));
  EXPECT_TRUE(has(error_with("/pre_tokenizer", split({{"String", ""}}, "Removed")),
                  {"not empty", ": pre_tokenizer.pattern.String)"}));
  EXPECT_TRUE(has(error_with("/pre_tokenizer", split({{"String", "a"}}, "Kept")),
                  {"Contiguous, got \"Kept\"", ": pre_tokenizer.behavior)"}));
  EXPECT_TRUE(
      has(error_with("/decoder", {{"type", "Strip"}, {"content", "ab"}, {"start", 1}, {"stop", 0}}),
          {"one character", ": decoder.content)"}));
  EXPECT_TRUE(
      has(error_with("/pre_tokenizer",
                     {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "last"}}),
          {"always, first or never", ": pre_tokenizer.prepend_scheme)"}));
}

// Each cuts within the one before: tens of thousands would need more stack than there is.
TEST_F(TokenizerFile, ASequenceHasAtMost64Steps) {
  const json replace = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "a"}};
  const json split = {{"type", "Split"},
                      {"pattern", {{"String", "b"}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  struct Case {
    const char *key, *steps;
    json step;
  };
  const Case cases[] = {{"normalizer", "normalizers", replace},
                        {"pre_tokenizer", "pretokenizers", split},
                        {"decoder", "decoders", replace}};
  for (const Case& c : cases) {
    json file = small_tokenizer();
    const auto with = [&](std::size_t num_steps) {
      // One in two is in a Sequence of its own.
      json steps = json::array();
      for (std::size_t i = 0; i < num_steps; ++i) {
        steps.push_back(i % 2 == 0 ? c.step : json{{"type", "Sequence"}, {c.steps, {c.step}}});
      }
      file[c.key] = {{"type", "Sequence"}, {c.steps, steps}};
      return file.dump();
    };
    folder_.write("tokenizer.json", with(64));
    const Tokenizer tokenizer = Tokenizer::read(folder_.path());
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("aab", false)), "aab");
    EXPECT_TRUE(has(error_of_text(with(65)), {"at most 64 steps, got an object",
                                              fmt::format(": {}.{}[64])", c.key, c.steps)}));
  }
}

TEST_F(TokenizerFile, IdsAreEachThereOnce) {
  EXPECT_TRUE(has(error_with("/model/vocab/a", 10), {"below the 10 tokens, got 10 of a "}));
  EXPECT_TRUE(has(error_with("/model/vocab/a", 2147483646), {"below the 10 tokens"}));
  EXPECT_TRUE(
      has(error_with("/model/vocab/a", 2147483648u), {"got 2147483648 of a", "model.vocab"}));
  EXPECT_TRUE(has(error_with("/model/vocab/a", -1), {"got -1 of a", "model.vocab"}));
  EXPECT_TRUE(has(error_with("/model/vocab/a", "0"), {"got \"0\" of a", "model.vocab"}));
  EXPECT_TRUE(has(error_with("/model/vocab/a", 1), {"each id once, got 1 of "}));
  EXPECT_TRUE(has(error_with("/added_tokens/0/id", 10), {"below the 10 tokens, got 10 of <e>"}));
  EXPECT_TRUE(has(error_with("/added_tokens/0/id", 3), {"each id once, got 3 of "}));
  EXPECT_TRUE(
      has(error_with("/added_tokens/0/content", "abc"),
          {"expected abc to have the id 6 of the vocabulary, got 9", ": added_tokens[0])"}));
  json file = small_tokenizer();
  file["added_tokens"].push_back(file["added_tokens"][0]);
  EXPECT_TRUE(
      has(error_of_text(file.dump()), {"that differ, got <e> twice", ": added_tokens[1])"}));
  file = small_tokenizer();
  file["added_tokens"][0]["content"] = "";
  EXPECT_TRUE(has(error_of_text(file.dump()), {"not empty", " of 9 ", ": added_tokens)"}));
}

TEST_F(TokenizerFile, MergesAreOfTokensAndMakeOne) {
  EXPECT_TRUE(has(error_with("/model/merges/1", {"x", "c"}),
                  {"the first part", "got 'x'", ": model.merges[1])"}));
  EXPECT_TRUE(has(error_with("/model/merges/1", "c x"), {"the second part", "got 'x'"}));
  EXPECT_TRUE(has(error_with("/model/merges/1", "c a"), {"what a merge makes", "got 'ca'"}));
  // Which would go on for ever.
  EXPECT_TRUE(has(error_with("/model/merges/1", {"", "a"}), {"the first part", "got ''"}));
  for (const json& merge : {json("ab"), json("a b c"), json({"a"}), json({"a", "b", "c"})}) {
    EXPECT_TRUE(
        has(error_with("/model/merges/1", merge), {"a merge of two tokens", ": model.merges[1])"}));
  }
  EXPECT_TRUE(has(error_with("/model/merges/1", 5), {"text, got 5"}));
  EXPECT_TRUE(has(error_with("/model/merges", "a b"), {"a list", ": model.merges)"}));
}

TEST_F(TokenizerFile, TemplatesAreOfOneTextAndOfTokens) {
  const auto with = [&](const json& single, const json& ids) {
    return error_with(
        "/post_processor",
        {{"type", "TemplateProcessing"},
         {"single", single},
         {"pair", json::array()},
         {"special_tokens", {{"t", {{"id", "t"}, {"ids", ids}, {"tokens", {"t"}}}}}}});
  };
  const json a = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json b = {{"Sequence", {{"id", "B"}, {"type_id", 0}}}};
  const json t = {{"SpecialToken", {{"id", "t"}, {"type_id", 0}}}};
  const json u = {{"SpecialToken", {{"id", "u"}, {"type_id", 0}}}};
  EXPECT_TRUE(
      has(with({a, a}, {1}), {"the sequence A, once", ": post_processor.single[1].Sequence)"}));
  EXPECT_TRUE(has(with(json::array({b}), {1}), {"the sequence A, once"}));
  EXPECT_TRUE(
      has(with(json::array({t}), {1}), {"the sequence A, once", ": post_processor.single)"}));
  EXPECT_TRUE(has(with({t, a}, {10}), {"below the 10 tokens, got 10", "special_tokens.t.ids[0])"}));
  EXPECT_TRUE(
      has(with({u, a}, {1}), {"expected key u, got none", "post_processor.special_tokens)"}));
}

TEST_F(TokenizerFile, OtherFilesAreRefusedForWhatTheyAre) {
  EXPECT_TRUE(has(error_of_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
                  {"git-lfs pointer", folder_ / "tokenizer.json"}));
  EXPECT_TRUE(has(error_of_text("{"), {"[json] expected JSON", "tokenizer.json"}));
  EXPECT_TRUE(has(error_of_text("[]"), {"an object, got a list", "tokenizer.json"}));
  EXPECT_TRUE(has(error_of_text("{}"), {"expected key model, got none"}));
  EXPECT_TRUE(has(error_of_text(std::string(1000, '[')), {"at most 16 levels"}));
  EXPECT_TRUE(has(error_of<IoError>([&] { Tokenizer::read(folder_ / "no"); }), {folder_ / "no"}));
  const testing::TempFolder empty;
  EXPECT_TRUE(
      has(error_of<IoError>([&] { Tokenizer::read(empty.path()); }),
          {"expected tokenizer.json, or vocab.json and merges.txt, got none", empty.path()}));
  empty.write("tokenizer.model", "");
  EXPECT_TRUE(
      has(error_of<IoError>([&] { Tokenizer::read(empty.path()); }),
          {"got tokenizer.model of SentencePiece", "AutoTokenizer.from_pretrained(FOLDER)"}));
}

TEST_F(TokenizerFile, OlderFilesSayLess) {
  json file = small_tokenizer();
  file["model"].erase("type");  // as GPT-2's
  file["model"].erase("ignore_merges");
  file["model"]["merges"] = {"a b", "ab c", "c d", "Ġ ab"};
  for (const char* key : {"version", "truncation", "padding", "normalizer", "post_processor"}) {
    file.erase(key);
  }
  folder_.write("tokenizer.json", file.dump());
  EXPECT_EQ(Tokenizer::read(folder_.path()).encode("abcd ab"), (Ids{6, 3, 8}));
}

TEST_F(TokenizerFile, TheFirstAndTheLastTokenAreThoseOfItsConfig) {
  folder_.write("tokenizer.json", small_tokenizer().dump());
  EXPECT_FALSE(Tokenizer::read(folder_.path()).bos().has_value());
  folder_.write("tokenizer_config.json",
                R"({"bos_token": "<e>", "eos_token": {"content": "abc"}, "other": [1e30]})");
  for (const std::string& path : {folder_.path(), folder_ / "tokenizer.json"}) {
    const Tokenizer tokenizer = Tokenizer::read(path);
    EXPECT_EQ(tokenizer.bos(), 9);
    EXPECT_EQ(tokenizer.eos(), 6);
  }
  folder_.write("tokenizer_config.json", R"({"bos_token": null, "eos_token": "no"})");
  EXPECT_TRUE(has(error_of<IoError>([&] { Tokenizer::read(folder_.path()); }),
                  {"a token of the tokenizer, got \"no\"", "tokenizer_config.json: eos_token)"}));
}

TEST_F(TokenizerFile, Gpt2sFilesAreRead) {
  folder_.write("vocab.json", R"({"a": 0, "b": 1, "Ġ": 2, "ab": 3, "<|endoftext|>": 4})");
  folder_.write("merges.txt", "#version: 0.2\na b\r\n");
  const Tokenizer tokenizer = Tokenizer::read(folder_.path());
  EXPECT_EQ(tokenizer.encode("ab a<|endoftext|>b"), (Ids{3, 2, 0, 4, 1}));
  EXPECT_EQ(tokenizer.decode(Ids{3, 2, 0, 4}), "ab a");
  EXPECT_EQ(tokenizer.bos(), 4);
  EXPECT_EQ(tokenizer.eos(), 4);
  folder_.write("merges.txt", "#version: 0.2\na b\nb a\n");
  EXPECT_TRUE(has(error_of<IoError>([&] { Tokenizer::read(folder_.path()); }),
                  {"what a merge makes", "got 'ba'", "merges.txt:3)"}));
  folder_.write("added_tokens.json", "{}");
  EXPECT_TRUE(has(error_of<IoError>([&] { Tokenizer::read(folder_.path()); }),
                  {"no added_tokens.json", "save the tokenizer as tokenizer.json"}));
}

TEST_F(TokenizerFile, TheConfigOfGpt2sFilesSaysWhatStandsAroundAText) {
  folder_.write("vocab.json", R"({"a": 0, "b": 1, "Ġ": 2, "ab": 3, "<|endoftext|>": 4, "Ġa": 5})");
  folder_.write("merges.txt", "a b\nĠ a\n");
  // As the GPT2Tokenizer of transformers.
  struct Case {
    const char* config;
    Ids ids;  // of "a"
  };
  const Case cases[] = {
      {"{}", {0}},
      {R"({"add_bos_token": true})", {4, 0}},
      {R"({"add_bos_token": true, "add_eos_token": false})", {4, 0}},
      {R"({"add_bos_token": true, "add_eos_token": null})", {4, 0}},
      {R"({"add_eos_token": true})", {0, 4}},
      {R"({"add_bos_token": false, "add_eos_token": true})", {0, 4}},
      {R"({"add_bos_token": true, "add_eos_token": true})", {4, 0, 4}},
      {R"({"add_bos_token": true, "add_eos_token": true, "bos_token": "ab"})", {3, 0, 4}},
      {R"({"add_bos_token": true, "add_eos_token": true, "bos_token": null})", {0, 4}},
      {R"({"add_bos_token": false, "add_eos_token": false})", {0}},
      {R"({"add_prefix_space": true, "add_bos_token": true})", {4, 5}},
  };
  for (const Case& c : cases) {
    folder_.write("tokenizer_config.json", c.config);
    const Tokenizer tokenizer = Tokenizer::read(folder_.path());
    EXPECT_EQ(tokenizer.encode("a"), c.ids) << c.config;
  }
  EXPECT_EQ(Tokenizer::read(folder_.path()).encode("a<|endoftext|>ab a"), (Ids{4, 5, 4, 2, 3, 5}));
  for (const char* key : {"add_bos_token", "add_eos_token", "add_prefix_space"}) {
    folder_.write("tokenizer_config.json", json{{key, 1}}.dump());
    EXPECT_TRUE(has(error_of<IoError>([&] { Tokenizer::read(folder_.path()); }),
                    {"true or false, got 1", std::string("tokenizer_config.json: ") + key}));
  }
}

// transformers leaves them out there too.
TEST_F(TokenizerFile, ATokenizerJsonSaysItselfWhatStandsAroundAText) {
  folder_.write("tokenizer.json", testing::small_tokenizer_with_end(/*is_first=*/true).dump());
  for (const bool adds : {false, true}) {
    const json config = {{"bos_token", "abc"},
                         {"eos_token", "<e>"},
                         {"add_bos_token", adds},
                         {"add_eos_token", adds}};
    folder_.write("tokenizer_config.json", config.dump());
    EXPECT_EQ(Tokenizer::read(folder_.path()).encode("ab"), (Ids{9, 5}));
  }
}

TEST_F(TokenizerFile, IdsThatAreNoTokensAreNotDecoded) {
  const Tokenizer tokenizer = Tokenizer::read(folder_.write("t.json", small_tokenizer().dump()));
  for (const std::int32_t id : {-1, 10}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      tokenizer.decode(Ids{0, id});
                    }),
                    {"ids in [0, 10), got " + std::to_string(id)}));
  }
}

}  // namespace
}  // namespace tessera::tools

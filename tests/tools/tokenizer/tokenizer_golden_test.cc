// Ids and texts are those of the tokenizers package: tests/golden/make_tokenizer_golden.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "tests/testing/concurrently.h"
#include "tools/tokenizer/text/utf8.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::int32_t>;

const std::string kFolder = "tests/golden/tokenizers";

nlohmann::json read_json(const std::string& name) {
  const std::string path = kFolder + "/" + name;
  return engine::parse_json(engine::read_text_file(path, 1 << 20), path);
}

std::vector<std::string> texts() { return read_json("texts.json").get<std::vector<std::string>>(); }

struct Expected {
  Ids ids, plain;
  std::string text, all_text;
};

std::vector<Expected> expected_of(const std::string& folder) {
  const std::string path = folder + "/expected.jsonl";
  std::istringstream lines(engine::read_text_file(path, 1 << 20));
  std::vector<Expected> all;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json value = engine::parse_json(line, path);
    const Ids ids = value.at("ids").get<Ids>();
    all.push_back({ids, value.at("plain").is_null() ? ids : value.at("plain").get<Ids>(),
                   value.at("text").get<std::string>(), value.at("all_text").get<std::string>()});
  }
  return all;
}

std::vector<std::string> folders() {
  std::vector<std::string> all;
  for (const auto& entry : fs::directory_iterator(kFolder)) {
    if (entry.is_directory()) all.push_back(entry.path().string());
  }
  std::ranges::sort(all);
  return all;
}

TEST(TokenizerGolden, IdsAndTextsAreThoseOfTheTokenizersPackage) {
  const std::vector<std::string> all = texts();
  ASSERT_EQ(folders().size(), 12u);  // eleven of a tokenizer.json, one of GPT-2's files
  for (const std::string& folder : folders()) {
    const Tokenizer tokenizer = Tokenizer::read(folder);
    const std::vector<Expected> expected = expected_of(folder);
    ASSERT_EQ(expected.size(), all.size());
    Encoder encoder(tokenizer);
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(folder + ": " + all[i]);
      EXPECT_EQ(tokenizer.encode(all[i]), expected[i].ids);
      Ids ids;
      encoder.encode(all[i], false, ids);
      EXPECT_EQ(ids, expected[i].plain);
      EXPECT_EQ(tokenizer.decode(expected[i].ids), expected[i].text);
      EXPECT_EQ(tokenizer.decode(expected[i].ids, false), expected[i].all_text);
    }
  }
}

std::string bytes_of(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// Texts are those of bytes.decode("utf-8", "replace").
TEST(TokenizerGolden, WhatIsNotUtf8IsReplacedAsPythonDoes) {
  const nlohmann::json cases = read_json("bytes.json");
  ASSERT_GT(cases.size(), 80u);
  std::map<std::string, Tokenizer> tokenizers;
  for (const auto& [name, ignored] : cases[0].at("ids").items()) {
    tokenizers.emplace(name, Tokenizer::read(kFolder + "/" + name));
  }
  ASSERT_EQ(tokenizers.size(), 3u);
  for (const nlohmann::json& c : cases) {
    const std::string bytes = bytes_of(c.at("hex").get<std::string>());
    std::string buffer;
    EXPECT_EQ(valid_utf8(bytes, buffer), c.at("text").get<std::string>()) << c.at("hex");
    for (const auto& [name, tokenizer] : tokenizers) {
      EXPECT_EQ(tokenizer.encode(bytes), c.at("ids").at(name).get<Ids>()) << name << c.at("hex");
    }
  }
}

// Were work to grow with the square of a word's length, each would take minutes, and the test run
// out of its time.
TEST(TokenizerGolden, AMegabyteOfOneLetterIsEncoded) {
  for (const nlohmann::json& c : read_json("runs.json")) {
    const auto folder = c.at("folder").get<std::string>(),
               letter = c.at("letter").get<std::string>();
    const auto num_letters = c.at("num_letters").get<std::size_t>();
    ASSERT_GE(num_letters, 1'000'000u);
    std::string text;
    for (std::size_t i = 0; i < num_letters; ++i) text += letter;
    const Tokenizer tokenizer = Tokenizer::read(kFolder + "/" + folder);
    const Ids ids = tokenizer.encode(text), last = c.at("last").get<Ids>();
    ASSERT_EQ(ids.size(), c.at("num_ids").get<std::size_t>()) << folder;
    EXPECT_EQ(Ids(ids.end() - std::ssize(last), ids.end()), last) << folder;
  }
}

// Parts of a text as its tokens come are the text.
TEST(TokenizerGolden, StreamsAddUpToTheText) {
  for (const std::string& folder : folders()) {
    const Tokenizer tokenizer = Tokenizer::read(folder);
    for (const Expected& expected : expected_of(folder)) {
      for (const bool skip_special : {true, false}) {
        StreamDecoder stream(tokenizer, skip_special);
        std::string text;
        for (const std::int32_t id : expected.ids) text += stream.next(id);
        text += stream.finish();
        EXPECT_EQ(text, tokenizer.decode(expected.ids, skip_special)) << folder;
      }
    }
  }
}

TEST(TokenizerGolden, ThreadsShareATokenizer) {
  const std::vector<std::string> all = texts();
  const std::string folder = folders().at(2);
  const Tokenizer tokenizer = Tokenizer::read(folder);
  const std::vector<Expected> expected = expected_of(folder);
  testing::for_each_concurrently(std::vector<int>{0, 1, 2, 3}, [&](int) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(all[i]), expected[i].ids);
      EXPECT_EQ(tokenizer.decode(expected[i].ids), expected[i].text);
    }
  });
}

}  // namespace
}  // namespace tessera::tools

#include "tools/data/data_fit.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

/// Ids of a tokenizer of `vocab` tokens, as they come in text: often small, now and then large.
template <class T>
std::string ids(std::int64_t vocab, std::int64_t n = 400) {
  std::vector<T> tokens;
  std::uint64_t state = 1;
  for (std::int64_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t limit = i % 3 == 0 ? 300 : static_cast<std::uint64_t>(vocab);
    tokens.push_back(static_cast<T>((state >> 33) % limit));
  }
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T)};
}

const std::string kText = "In the beginning God created the heaven and the earth.\n";

class DataFitTest : public ::testing::Test {
 protected:
  std::string refused(const std::string& path, const DataFit& fit) const {
    return error_of<IoError>([&] { check_data_fit(TokenFile(path, fit.format), fit); });
  }
  static void accepted(const std::string& path, const DataFit& fit) {
    EXPECT_NO_THROW(check_data_fit(TokenFile(path, fit.format), fit)) << path;
  }

  const TempFolder folder_;
  const std::string text_ = folder_.write("text.txt", kText);
  const std::string gpt2_ = folder_.write("gpt2.bin", ids<std::uint16_t>(50'257));
};

TEST_F(DataFitTest, WhatBelongsTogetherIsAccepted) {
  accepted(text_, {});
  accepted(text_, {.vocab = 50'257});
  accepted(text_, {.vocab = 384, .init_from = "model"});  // bytes, and a few more
  accepted(gpt2_, {.vocab = 50'257});
  accepted(gpt2_, {.vocab = 65'536, .init_from = "model"});
  accepted(folder_.write("chars.bin", ids<std::uint16_t>(65)), {.vocab = 65});
  accepted(folder_.write("wide.bin", ids<std::uint32_t>(119'547)),
           {.format = TokenFormat::kUInt32, .vocab = 119'547});
  accepted(folder_.write("latin1.txt",
                         "Stra\xDF"
                         "e und noch mehr, in alter Schrift"),
           {});
}

TEST_F(DataFitTest, BytesAreNoTokensOfAModelWithATokenizer) {
  const std::string error = refused(text_, {.vocab = 50'257, .init_from = "some/gpt2"});
  EXPECT_TRUE(has(error, {"got text", "none of its 50257 tokens", "give --data.tokenizer",
                          "--data.format=bytes", "init.from=some/gpt2", "text.txt"}));
  accepted(text_, {.vocab = 50'257, .init_from = "some/gpt2", .tokenizes = true});
  accepted(text_, {.format = TokenFormat::kBytes, .vocab = 50'257, .init_from = "some/gpt2"});
}

TEST_F(DataFitTest, SixteenBitsDoNotReachALargeVocabulary) {
  for (const std::int64_t vocab : {65'537, 119'547}) {
    EXPECT_TRUE(has(refused(gpt2_, {.vocab = vocab}),
                    {std::to_string(vocab), "16 bits, which end at 65535", "--data.format=uint32",
                     "--model.vocab", "gpt2.bin"}));
    accepted(gpt2_, {.format = TokenFormat::kUInt16, .vocab = vocab});
  }
}

TEST_F(DataFitTest, NumbersWiderThanTheyAreReadAreSeen) {
  for (const std::int64_t vocab : {50'257, 119'547, 200'000}) {
    const std::string wide = folder_.write("wide.bin", ids<std::uint32_t>(vocab));
    EXPECT_TRUE(has(refused(wide, {.vocab = vocab}), {"looks like 32", "--data.format=uint32"}));
    accepted(wide, {.format = TokenFormat::kUInt16, .vocab = vocab});  // who says so is believed
    const std::string numpy = folder_.write("numpy.bin", ids<std::int64_t>(vocab));
    for (const TokenFormat format : {TokenFormat::kAuto, TokenFormat::kUInt32}) {
      EXPECT_TRUE(has(refused(numpy, {.format = format, .vocab = vocab}),
                      {"looks like 64", "astype('uint16')"}));
    }
  }
  const std::string chars = folder_.write("chars.bin", ids<std::int64_t>(65));
  EXPECT_TRUE(has(refused(chars, {.vocab = 65}), {"looks like 64"}));
}

// Zeros are no ids that are wide, but padding.
TEST_F(DataFitTest, ZerosAreNotTheUpperHalfOfNumbers) {
  std::string padded = ids<std::uint16_t>(50'257, 20);
  padded.resize(800);
  accepted(folder_.write("padded.bin", padded), {.vocab = 50'257});
}

TEST_F(DataFitTest, TextIsNoTokensAndTokensAreNoText) {
  const std::string text = folder_.write("text.bin", kText +
                                                         "Eine Stra\xC3\x9F"
                                                         "e.");
  EXPECT_TRUE(has(refused(text, {.vocab = 50'257}), {"got text", "--data.format=bytes"}));
  accepted(text, {.format = TokenFormat::kBytes});
  for (const char* name : {"tokens", "tokens.u16", "tokens.txt"}) {
    const std::string path = folder_.write(name, ids<std::uint16_t>(50'257));
    EXPECT_TRUE(has(refused(path, {}), {"a binary file", "--data.format=uint16 or uint32", name}));
    accepted(path, {.format = TokenFormat::kBytes});
    accepted(path, {.format = TokenFormat::kUInt16, .vocab = 50'257});
  }
  for (const std::string mark : {"\xFF\xFE", "\xFE\xFF"}) {
    const std::string path = folder_.write("windows.txt", mark + "a\n");
    EXPECT_TRUE(has(refused(path, {}), {"UTF-16", "iconv -f UTF-16 -t UTF-8"}));
  }
}

TEST_F(DataFitTest, SourcesOfAMixBelongTogether) {
  const DataFit fit{.vocab = 50'257, .option = "data.mix"};
  const auto check = [](const std::string& a, const std::string& b, const DataFit& asked) {
    check_mix_fit(std::array{TokenFile(a), TokenFile(b)}, asked, false);
  };
  const auto refusal = [&](const std::string& a, const std::string& b, const DataFit& asked) {
    return error_of<IoError>([&] { check(a, b, asked); });
  };
  EXPECT_NO_THROW(check(text_, text_, {}));
  EXPECT_NO_THROW(check(gpt2_, gpt2_, fit));
  EXPECT_TRUE(has(refusal(gpt2_, text_, fit),
                  {"one kind of tokens, got nanoGPT uint16 in", "gpt2.bin and text in", "text.txt",
                   "--data.tokenizer", "data.mix"}));
  DataFit tokenized = fit;
  tokenized.tokenizes = true;
  EXPECT_NO_THROW(check(gpt2_, text_, tokenized));
  tokenized.format = TokenFormat::kBytes;
  EXPECT_TRUE(are_tokens_bytes(TokenFile(text_), tokenized));
  // Each of them belongs to the model as well.
  const std::string utf16 = folder_.write("b.txt",
                                          "\xFF\xFE"
                                          "a");
  EXPECT_TRUE(has(refusal(text_, utf16, fit), {"UTF-16", "(data.mix, ", "b.txt"}));
  EXPECT_NO_THROW(check_mix_fit({}, {}, true));  // of files that are not there nothing is known
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] {
                    check_mix_fit(std::array{TokenFile(gpt2_), TokenFile(gpt2_)}, fit, true);
                  }),
                  {"expected documents to pack, got nanoGPT uint16", "data.packing", "gpt2.bin"}));
}

TEST_F(DataFitTest, AVocabularyFarAboveTheDataIsSaid) {
  const TokenFile text(text_), tokens(gpt2_);
  EXPECT_EQ(data_warnings(text, {.vocab = 256}, 255).size(), 0u);
  EXPECT_EQ(data_warnings(text, {.vocab = 512}, 255).size(), 0u);
  const auto of_text = data_warnings(text, {.vocab = 50'257}, text.max_possible_token());
  ASSERT_EQ(of_text.size(), 1u);
  EXPECT_TRUE(
      has(of_text[0], {"50,257 tokens", "255 at most", "--model.vocab=256", "--data.tokenizer"}));
  const auto of_model = data_warnings(text, {.vocab = 307, .init_from = "model"}, 255);
  ASSERT_EQ(of_model.size(), 1u);
  EXPECT_TRUE(
      has(of_model[0], {"307 tokens", "read as bytes", "--data.tokenizer", "--data.format=bytes"}));
  const DataFit meant{.format = TokenFormat::kBytes, .vocab = 307, .init_from = "model"};
  EXPECT_EQ(data_warnings(text, meant, 255).size(), 0u);
  EXPECT_EQ(data_warnings(tokens, {.vocab = 50'257}, 50'256).size(), 0u);
  EXPECT_EQ(data_warnings(tokens, {.vocab = 50'257}, 30'000).size(), 0u);
  EXPECT_EQ(data_warnings(tokens, {.vocab = 256}, 64).size(), 0u);
  // As of a memory map that a program has made and not filled.
  EXPECT_EQ(data_warnings(tokens, {.vocab = 256}, 0),
            std::vector<std::string>{"every token of the data is 0: has the file been written?"});
  const auto of_tokens = data_warnings(tokens, {.vocab = 50'257}, 9'999);
  ASSERT_EQ(of_tokens.size(), 1u);
  EXPECT_TRUE(has(of_tokens[0], {"50,257 tokens", "none above 9,999", "--model.vocab"}));
}

}  // namespace
}  // namespace tessera::tools

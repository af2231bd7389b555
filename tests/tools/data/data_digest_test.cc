#include "tools/data/data_digest.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using testing::TempFolder;

std::string text_of(std::size_t size) {
  std::string text;
  for (std::size_t i = 0; i < size; ++i) text += static_cast<char>('a' + i * i % 23);
  return text;
}

TEST(DataDigest, OfTokensIsOfTheirIdsInEveryFormat) {
  const TempFolder folder;
  const std::string text = text_of(1000);
  std::string narrow, wide;
  for (const char c : text) {
    narrow += {c, '\0'};
    wide += {c, '\0', '\0', '\0'};
  }
  std::string header(1024, '\0');  // of llm.c: 20240801, version 7, 1000 tokens of 32 bits
  const std::uint32_t words[] = {20240801, 7, 1000};
  for (std::size_t i = 0; i < sizeof(words); ++i) {
    header[i] = static_cast<char>(words[i / 4] >> (8 * (i % 4)));
  }
  const std::string expected = digest_of(TokenFile(folder.write("a.txt", text)));
  EXPECT_EQ(expected.substr(0, 12), "1000 tokens ");
  EXPECT_EQ(digest_of(TokenFile(folder.write("b.txt", text))), expected);
  EXPECT_EQ(digest_of(TokenFile(folder.write("a.bin", narrow))), expected);
  EXPECT_EQ(digest_of(TokenFile(folder.write("b.bin", header + wide))), expected);
}

TEST(DataDigest, SeesEveryTokenOfAFileThatIsReadWhole) {
  const TempFolder folder;
  const std::string text = text_of(300);
  std::set<std::string> digests = {digest_of(TokenFile(folder.write("text", text)))};
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] ^= 1;
    digests.insert(digest_of(TokenFile(folder.write("text", other))));
  }
  std::string swapped = text;
  std::swap(swapped[0], swapped[1]);
  digests.insert(digest_of(TokenFile(folder.write("text", swapped))));
  digests.insert(digest_of(TokenFile(folder.write("text", text.substr(0, 299)))));
  EXPECT_EQ(digests.size(), 303u);
}

// 4,096 parts of 4 tokens, of 40,000: the first 4, the last 4, and one in ten steps or so.
TEST(DataDigest, OfALargeFileIsOfPartsFromItsFirstTokenToItsLast) {
  constexpr std::int64_t kMost = 4096 * 4;
  const TempFolder folder;
  const std::string text = text_of(40'000);
  const auto digest_with = [&](std::size_t changed, std::size_t size) {
    std::string other = text.substr(0, size);
    if (changed < size) other[changed] ^= 1;
    return digest_of(TokenFile(folder.write("text", other)), kMost);
  };
  const std::string expected = digest_with(40'000, 40'000);
  for (const std::size_t seen : {0u, 3u, 39'996u, 39'999u}) {
    EXPECT_NE(digest_with(seen, 40'000), expected) << seen;
  }
  EXPECT_EQ(digest_with(5, 40'000), expected) << "between two parts";
  EXPECT_NE(digest_with(40'000, 39'999), expected);
  std::size_t num_seen = 0;
  for (std::size_t i = 20'000; i < 20'100; ++i) num_seen += digest_with(i, 40'000) != expected;
  EXPECT_GE(num_seen, 35u);
  EXPECT_LE(num_seen, 45u);
  // As large as is read whole.
  std::string other = text.substr(0, kMost);
  other[5] ^= 1;
  EXPECT_NE(digest_of(TokenFile(folder.write("text", other)), kMost),
            digest_of(TokenFile(folder.write("text", text.substr(0, kMost))), kMost));
}

TEST(DataDigest, OfImagesIsOfPixelsLabelsAndSizes) {
  const ImageSet set{
      .num_images = 2, .height = 2, .width = 1, .pixels = {1, 2, 3, 4}, .labels = {5, 6}};
  const FashionMnist data{set, set};
  std::set<std::string> digests = {digest_of(data), digest_of(FashionMnist(data))};
  EXPECT_EQ(digests.size(), 1u);
  for (ImageSet FashionMnist::*part : {&FashionMnist::train, &FashionMnist::test}) {
    FashionMnist pixel = data, label = data, shape = data;
    (pixel.*part).pixels[3] = 5;
    (label.*part).labels[0] = 6;
    std::swap((shape.*part).height, (shape.*part).width);
    for (const FashionMnist& other : {pixel, label, shape}) digests.insert(digest_of(other));
  }
  EXPECT_EQ(digests.size(), 7u);
}

}  // namespace
}  // namespace tessera::tools

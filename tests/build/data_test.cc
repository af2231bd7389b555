#include <gtest/gtest.h>
#include <zlib.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

namespace tessera {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The first `N` big-endian words of a gzipped IDX file.
template <int N>
std::array<uint32_t, N> idx_header(const std::string& path) {
  std::array<uint8_t, N * 4> bytes{};
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (file == nullptr || gzread(file.get(), bytes.data(), bytes.size()) != N * 4) return {};
  std::array<uint32_t, N> words{};
  for (size_t i = 0; i < bytes.size(); ++i) words[i / 4] = words[i / 4] << 8 | bytes[i];
  return words;
}

TEST(Data, TheBibleIsPlainTextInBookOrder) {
  const std::string text = read_file("third_party/data/kjv.txt");
  EXPECT_GT(text.size(), 4'000'000U);
  EXPECT_TRUE(
      text.starts_with("In the beginning God created the heaven and the earth.\nAnd the earth"));
  EXPECT_TRUE(text.ends_with("\nThe grace of our Lord Jesus Christ be with you all. Amen.\n"));
  EXPECT_NE(text.find("in a coffin in Egypt.\n\nNow these are the names"), std::string::npos);
  for (const unsigned char c : text) ASSERT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << int{c};
}

TEST(Data, FashionMnistHasItsImagesAndLabels) {
  const std::string folder = "third_party/data/fashion_mnist/";
  using Images = std::array<uint32_t, 4>;
  using Labels = std::array<uint32_t, 2>;
  EXPECT_EQ(idx_header<4>(folder + "train-images-idx3-ubyte.gz"), (Images{0x803, 60000, 28, 28}));
  EXPECT_EQ(idx_header<2>(folder + "train-labels-idx1-ubyte.gz"), (Labels{0x801, 60000}));
  EXPECT_EQ(idx_header<4>(folder + "t10k-images-idx3-ubyte.gz"), (Images{0x803, 10000, 28, 28}));
  EXPECT_EQ(idx_header<2>(folder + "t10k-labels-idx1-ubyte.gz"), (Labels{0x801, 10000}));
}

}  // namespace
}  // namespace tessera

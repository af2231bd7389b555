#include "tools/data/fashion_mnist.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

constexpr std::string_view kTrainImages = "train-images-idx3-ubyte";
constexpr std::string_view kTrainLabels = "train-labels-idx1-ubyte";

std::string idx(std::uint32_t magic, const std::vector<std::uint32_t>& dims,
                std::string_view bytes) {
  std::string text;
  const auto word = [&](std::uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8) text += static_cast<char>(value >> shift & 255);
  };
  word(magic);
  for (const auto dim : dims) word(dim);
  return text + std::string(bytes);
}

std::string compressed(std::string_view bytes) {
  std::string out(bytes.size() + 1000, '\0');
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// A folder of three training and one test image of 2 x 1, half of the files compressed.
void write_small(const TempFolder& folder) {
  folder.write(kTrainImages, idx(0x803, {3, 2, 1}, std::string("\x01\x02\x03\x04\x05\xFF", 6)));
  folder.write("train-labels-idx1-ubyte.gz",
               compressed(idx(0x801, {3}, std::string("\x09\x00\x05", 3))));
  folder.write("t10k-images-idx3-ubyte.gz", compressed(idx(0x803, {1, 2, 1}, "ab")));
  folder.write("t10k-labels-idx1-ubyte", idx(0x801, {1}, "\x01"));
}

TEST(FashionMnist, LoadsPlainAndCompressedFiles) {
  const TempFolder folder;
  write_small(folder);
  const FashionMnist data = load_fashion_mnist(folder.path());
  EXPECT_EQ(data.train.num_images, 3);
  EXPECT_EQ(data.train.height, 2);
  EXPECT_EQ(data.train.width, 1);
  EXPECT_EQ(data.train.num_pixels(), 2);
  EXPECT_EQ(data.train.pixels, (std::vector<std::uint8_t>{1, 2, 3, 4, 5, 255}));
  EXPECT_EQ(data.train.labels, (std::vector<std::uint8_t>{9, 0, 5}));
  EXPECT_EQ(data.test.pixels, (std::vector<std::uint8_t>{'a', 'b'}));
  EXPECT_EQ(data.test.labels, (std::vector<std::uint8_t>{1}));
}

TEST(FashionMnist, RefusesFilesThatAreNotWhatTheySay) {
  const auto zeros = [](std::size_t n) { return std::string(n, '\0'); };
  const std::string sound = compressed(idx(0x803, {3, 2, 1}, "abcdef"));
  const std::string bulky = compressed(idx(0x803, {3, 20, 20}, zeros(1200)));
  std::string flipped = sound;
  flipped[flipped.size() - 6] ^= 1;  // its checksum
  const struct {
    std::string_view file;
    std::string bytes;
    std::string_view what;
  } cases[] = {
      {kTrainImages, "", "got 0"},
      {kTrainImages, "\x01\x02", "got 2"},
      {kTrainImages, idx(0x801, {3}, "abc"), "magic 0x803, got 0x801"},
      {kTrainImages, "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"},
      {kTrainLabels, "<!DOCTYPE html>", "an HTML page"},
      {kTrainImages, idx(0x803, {3, 2}, ""), "got 0"},
      {kTrainImages, idx(0x803, {0, 2, 1}, ""), "dimension 0"},
      {kTrainImages, idx(0x803, {3, 0, 1}, ""), "dimension 1"},
      {kTrainImages, idx(0x803, {3, 2, 0xFFFFFFFF}, ""), "dimension 2"},
      {kTrainImages, idx(0x803, {0xFFFFFFFF, 2, 1}, ""), "dimension 0"},
      {kTrainImages, idx(0x803, {3, 4096, 4096}, "abc"), "more bytes, got 3"},
      {kTrainImages, idx(0x803, {3, 2, 1}, "abcde"), "got 5"},
      {kTrainImages, idx(0x803, {3, 2, 1}, "abcdefg"), "got more"},
      {kTrainImages, idx(0x803, {3, 3, 1}, zeros(9)), "test images of 3 x 1"},
      {kTrainImages, idx(0x803, {3, 2, 2}, zeros(12)), "test images of 2 x 2"},
      {kTrainImages, bulky.substr(0, bulky.size() - 9), "unexpected end of file"},
      {kTrainImages, sound.substr(0, sound.size() - 1), "unexpected end of file"},
      {kTrainImages, flipped, "incorrect data check"},
      {kTrainLabels, idx(0x803, {3, 1, 1}, "abc"), "magic 0x801"},
      {kTrainLabels, idx(0x801, {2}, zeros(2)), "3 labels"},
      {kTrainLabels, idx(0x801, {4}, zeros(4)), "3 labels"},
      {kTrainLabels, idx(0x801, {3}, std::string("\x00\x0A\x00", 3)), "got 10 at position 1"},
  };
  for (const auto& [file, bytes, what] : cases) {
    const TempFolder folder;
    write_small(folder);
    folder.write(file, bytes);
    const std::string named = what.starts_with("test images") ? folder.path() : std::string(file);
    EXPECT_TRUE(has(error_of<IoError>([&] { load_fashion_mnist(folder.path()); }), {what, named}))
        << what;
  }
}

TEST(FashionMnist, ReadsSizesOfEveryByte) {
  const TempFolder folder;
  constexpr std::size_t kNumImages = 66'051;  // 0x010203
  std::string pixels(kNumImages, '\0'), labels(kNumImages, '\x07');
  pixels.back() = 'z';
  folder.write(kTrainImages, idx(0x803, {kNumImages, 1, 1}, pixels));
  folder.write("train-labels-idx1-ubyte.gz", compressed(idx(0x801, {kNumImages}, labels)));
  folder.write("t10k-images-idx3-ubyte", idx(0x803, {1, 1, 1}, "a"));
  folder.write("t10k-labels-idx1-ubyte", idx(0x801, {1}, "\x01"));
  const FashionMnist data = load_fashion_mnist(folder.path());
  EXPECT_EQ(data.train.num_images, 66'051);
  EXPECT_EQ(data.train.pixels.size(), kNumImages);
  EXPECT_EQ(data.train.pixels.back(), 'z');
  EXPECT_EQ(data.train.labels, std::vector<std::uint8_t>(kNumImages, 7));
}

TEST(FashionMnist, NamesTheFileThatIsMissing) {
  const TempFolder folder;
  EXPECT_TRUE(has(error_of<IoError>([&] { load_fashion_mnist(folder.path()); }),
                  {std::string_view(folder.path()), kTrainImages}));
  std::filesystem::create_directory(folder / kTrainImages);
  EXPECT_TRUE(has(error_of<IoError>([&] { load_fashion_mnist(folder.path()); }),
                  {"a folder", kTrainImages}));
}

TEST(FashionMnist, LoadsTheRealData) {
  const FashionMnist data = load_fashion_mnist("third_party/data/fashion_mnist");
  EXPECT_EQ(data.train.num_images, 60'000);
  EXPECT_EQ(data.test.num_images, 10'000);
  EXPECT_EQ(data.train.num_pixels(), 28 * 28);
  std::vector<int> counts(10);
  for (const auto label : data.train.labels) ++counts[label];
  EXPECT_EQ(counts, std::vector<int>(10, 6000));
}

}  // namespace
}  // namespace tessera::tools

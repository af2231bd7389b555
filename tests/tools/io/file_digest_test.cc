// A digest sees every byte of a small file, and of a large one its length and its ends.
#include "tools/io/file_digest.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/error.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

class FileDigest : public ::testing::Test {
 protected:
  std::string digest(const std::string& text, std::int64_t most) {
    return tools::digest_of_file(folder_.write("file", text), most);
  }
  testing::TempFolder folder_;
};

TEST_F(FileDigest, SaysLengthAndChecksum) {
  // XXH3_64bits of nothing, as its specification has it.
  EXPECT_EQ(digest("", 1024), "0 bytes 2d06800538d394c2");
  EXPECT_TRUE(digest("abc", 1024).starts_with("3 bytes "));
  EXPECT_THROW(tools::digest_of_file(folder_ / "none"), engine::IoError);
}

TEST_F(FileDigest, EveryByteOfASmallFileCounts) {
  const std::string text(1000, 'a');
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = 'b';
    EXPECT_NE(digest(other, 1000), digest(text, 1000)) << i;
  }
}

TEST_F(FileDigest, OfALargeFileTheFirstAndTheLastBytesCount) {
  const std::string text(5001, 'a');
  for (const std::size_t i : {std::size_t{0}, std::size_t{5000}}) {
    std::string other = text;
    other[i] = 'b';
    EXPECT_NE(digest(other, 512), digest(text, 512)) << i;
  }
  EXPECT_NE(digest(text + "a", 512), digest(text, 512));
}

}  // namespace
}  // namespace tessera

#include "tools/io/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>

namespace tessera::tools {
namespace {

std::string digest(const std::string& text, std::size_t piece) {
  Sha256 sha;
  for (std::size_t at = 0; at < text.size(); at += piece) {
    sha.update(std::as_bytes(std::span(text)).subspan(at, std::min(piece, text.size() - at)));
  }
  return sha.hex();
}

TEST(Sha256, MatchesTheStandardsExamples) {
  EXPECT_EQ(digest("", 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest(std::string(1'000'000, 'a'), 1 << 16),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnThePieces) {
  const std::string text(1000, 'x');
  EXPECT_EQ(digest(text, 1), digest(text, 1000));
  EXPECT_EQ(digest(text, 63), digest(text, 1000));
}

TEST(Sha256, GoesOnAfterADigest) {
  const std::string text = "abc";
  Sha256 sha;
  sha.update(std::as_bytes(std::span(text)).first(1));
  EXPECT_EQ(sha.hex(), digest("a", 1));
  sha.update(std::as_bytes(std::span(text)).subspan(1));
  EXPECT_EQ(sha.hex(), digest("abc", 3));
}

}  // namespace
}  // namespace tessera::tools

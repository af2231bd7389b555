// The file of chosen algorithms: what is written can be read, and nothing else can.
#include "engine/gemm/gemm_algorithms.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/error.h"

namespace tessera::engine {
namespace {

const std::string kHeader = "tessera gemm algorithms 1\n";
const std::string kWords =
    "00000001 00000002 00000003 00000004 00000005 00000006 00000007 00000008 "
    "00000009 0000000a 0000000b 0000000c 0000000d 0000000e 0000000f deadbeef";

GemmAlgorithms::Algorithm some_algorithm() {
  GemmAlgorithms::Algorithm algorithm;
  for (std::uint32_t i = 0; i < algorithm.size(); ++i) algorithm[i] = i + 1;
  algorithm.back() = 0xDEADBEEF;
  return algorithm;
}

TEST(GemmAlgorithmsTest, ReadsWhatItWrites) {
  GemmAlgorithms written;
  EXPECT_EQ(written.text(), kHeader);
  written.insert("b | c", some_algorithm());
  written.insert("a", {});
  GemmAlgorithms read;
  read.load(written.text(), "file");
  EXPECT_EQ(read.text(), written.text());
  EXPECT_EQ(read.find("b | c"), some_algorithm());
  EXPECT_EQ(read.find("a"), GemmAlgorithms::Algorithm{});
  EXPECT_EQ(read.find("b"), std::nullopt);
  read.load(kHeader + "b | c\t" + kWords, "the same again, and no newline at the end");
  EXPECT_EQ(read.text(), written.text());
}

TEST(GemmAlgorithmsTest, KeepsTheFirstChoice) {
  GemmAlgorithms algorithms;
  EXPECT_EQ(algorithms.insert("a", some_algorithm()), some_algorithm());
  EXPECT_EQ(algorithms.insert("a", {}), some_algorithm());
}

TEST(GemmAlgorithmsTest, RefusesWhatIsMalformedNamingFileAndLine) {
  struct Case {
    std::string text;
    int line;
  };
  const std::string good = "a\t" + kWords + "\n";
  const std::vector<Case> cases = {
      {"", 1},
      {"tessera gemm algorithms 2\n", 1},
      {kHeader + "\n", 2},
      {kHeader + good + "no tab " + kWords + "\n", 3},
      {kHeader + "\t" + kWords + "\n", 2},
      {kHeader + good + "b\t" + kWords.substr(9) + "\n", 3},
      {kHeader + "a\t" + kWords + " 00000000\n", 2},
      {kHeader + "a\t" + kWords.substr(0, kWords.size() - 1) + "g\n", 2},
      {kHeader + "a\t" + kWords.substr(0, kWords.size() - 1) + " \n", 2},
      {kHeader + "a\t" + kWords.substr(0, 8) + "\t" + kWords.substr(9) + "\n", 2},
      {kHeader + "a\t+" + kWords.substr(1) + "\n", 2},
      {kHeader + good + "a\tffffffff" + kWords.substr(8) + "\n", 3},
      {kHeader + good.substr(0, good.size() - 1) + "\r\n", 2},
  };
  for (const auto& [text, line] : cases) {
    SCOPED_TRACE(text);
    GemmAlgorithms algorithms;
    try {
      algorithms.load(text, "gemm.txt");
      ADD_FAILURE() << "read";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find(fmt::format("gemm.txt, line {})", line)),
                std::string::npos)
          << error.what();
    }
    EXPECT_EQ(algorithms.text(), kHeader);
  }
}

}  // namespace
}  // namespace tessera::engine

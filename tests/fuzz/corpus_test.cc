// The corpus of a target, without libFuzzer: with every compiler, in every run of the tests.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

std::map<std::string, std::string> corpus() {
  std::map<std::string, std::string> inputs;
  const std::filesystem::path folder = std::filesystem::path("tests/fuzz/corpus") / kTarget;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs[entry.path().filename().string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return inputs;
}

TEST(CorpusTest, WhatIsValidIsAcceptedAndNothingElse) {
  int num_valid = 0, num_refused = 0;
  for (const auto& [name, input] : corpus()) {
    SCOPED_TRACE(name);
    bool accepted = false;
    EXPECT_NO_THROW(accepted = is_accepted(input));
    if (name.starts_with("valid")) {
      EXPECT_TRUE(accepted);
      ++num_valid;
    } else if (name.starts_with("refused")) {
      EXPECT_FALSE(accepted);
      ++num_refused;
    } else {
      EXPECT_TRUE(name.starts_with("found")) << "expected valid*, refused* or found*";
    }
  }
  EXPECT_GE(num_valid, 1);
  EXPECT_GE(num_refused, 1);
}

}  // namespace
}  // namespace tessera::fuzz

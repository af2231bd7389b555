// What the part tokenize reports of a small tokenizer, next to a package that says fixed times.
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/bench/parts.h"
#include "tools/bench/tokenize.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::has;

class TokenizePart : public ::testing::Test {
 protected:
  TokenizePart() {
    folder_.write("tokenizer.json", testing::small_tokenizer().dump());
    folder_.write("text", "abc ab\ncd\n");  // the small tokenizer has no end of line
    config_.tokenizer = folder_.path();
    config_.rounds = 2;
    config_.peer = folder_ / "torch_gpt.py";
  }
  /// Lets a program stand for Python that notes its arguments and prints these ids and 1, 2, 4 and
  /// 8 seconds.
  void set_python(const std::vector<int>& ids) {
    json record = {{"version", "0.0"}, {"rows", json::array()}};
    double s = 0.5;
    for (const int n : ids) record["rows"].push_back({{"s", s *= 2}, {"ids", n}});
    config_.python = folder_.write("python", "#!/bin/sh\necho \"$@\" >>" + folder_ / "words" +
                                                 "\necho '" + testing::json_text(record) + "'\n");
    std::filesystem::permissions(config_.python, std::filesystem::perms::owner_all);
  }
  std::vector<json> rows() {
    {
      BenchReport report(folder_ / "lines");
      bench_tokenize(folder_ / "text", config_, report);
    }
    std::vector<json> rows;
    std::istringstream lines(folder_.read("lines"));
    for (std::string line; std::getline(lines, line);) rows.push_back(testing::parse_json(line));
    return rows;
  }

  const testing::TempFolder folder_;
  BenchConfig config_;
};

const std::vector<int> kIds = {3, 3, 1 << 18, 1 << 20};  // abc, space with ab, cd; a each time

TEST_F(TokenizePart, TimesTextsAndRunsOfALetterNextToThePackage) {
  set_python(kIds);
  const std::vector<json> all = rows();
  const char* const names[] = {"a text, one document", "a text, a document a line",
                               "one letter, 256 KB", "one letter, 1024 KB"};
  const double nbytes[] = {10, 8, 1 << 18, 1 << 20};
  ASSERT_EQ(all.size(), 4u);
  double s = 0.5;
  for (std::size_t i = 0; i < all.size(); ++i) {
    s *= 2;
    EXPECT_EQ(all[i].at("part"), "tokenize");
    EXPECT_EQ(all[i].at("row"), names[i]);
    EXPECT_EQ(all[i].at("ids"), kIds[i]);
    EXPECT_NEAR(all[i].at("mb").get<double>(), nbytes[i] * 1e-6, 1e-9);
    EXPECT_NEAR(all[i].at("theirs_mb_per_s").get<double>(), nbytes[i] * 1e-6 / s, 1e-9);
  }
  for (const std::size_t i : {2u, 3u}) {
    const double ours = all[i].at("mb_per_s");
    EXPECT_GT(ours, 0.01) << all[i];
    EXPECT_NEAR(all[i].at("ratio").get<double>(), ours / all[i].at("theirs_mb_per_s").get<double>(),
                1e-6 * ours);
  }
  const std::string words =
      folder_ / "tokenizers_texts.py " + folder_.path() + " " + folder_ / "text 262144 1048576\n";
  EXPECT_EQ(folder_.read("words"), words + words) << "once a round";
}

TEST_F(TokenizePart, IsAloneWithoutPython) {
  const std::vector<json> all = rows();
  ASSERT_EQ(all.size(), 4u);
  for (const json& row : all) {
    EXPECT_TRUE(row.at("theirs_mb_per_s").is_null() && row.at("ratio").is_null()) << row;
  }
}

TEST_F(TokenizePart, ComparesNoTimesOfDifferentIds) {
  set_python({3, 4, 1 << 18, 1 << 20});
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { rows(); }),
                  {"[bench] expected 3 ids of 'a text, a document a line' as ours, got 4",
                   "tokenizers_texts.py"}));
}

TEST_F(TokenizePart, NeedsATokenizer) {
  config_.tokenizer.clear();
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { rows(); }),
                  {"tokenizer.json", "(bench.tokenizer)"}));
}

}  // namespace
}  // namespace tessera::tools

// Files that the pages name are there.
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <string>

#include "tests/docs/pages.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// What Bazel lends a test are links into the sources.
fs::path sources() { return fs::canonical("README.md").parent_path(); }

TEST(Files, ThatPagesNameAreThere) {
  const std::regex file(
      "`((engine|ops|comm|shard|tools|tests|examples|docs|third_party)/[\\w/]+\\.\\w+)`");
  int num_files = 0;
  for (const std::string& page : pages()) {
    for (const std::string& line : lines_of(page)) {
      for (std::sregex_iterator i(line.begin(), line.end(), file), end; i != end; ++i) {
        const std::string name = (*i)[1];
        if (name.find("foo") != std::string::npos) continue;  // an example
        ++num_files;
        EXPECT_TRUE(fs::exists(sources() / name)) << page << ": " << name;
      }
    }
  }
  EXPECT_GE(num_files, 80);
}

// Two commands, what it is, what one can do, where to read on; all else has a page of its own.
TEST(Files, TheReadmeIsShort) { EXPECT_LE(lines_of("README.md").size(), 150u); }

}  // namespace
}  // namespace tessera::testing

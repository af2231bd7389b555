// Every test that a page or a mutant names is there.
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/docs/pages.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// What the pattern's group is, wherever it matches.
std::set<std::string> found(const std::string& file, const std::regex& pattern) {
  std::set<std::string> all;
  for (const std::string& line : lines_of(file)) {
    for (std::sregex_iterator i(line.begin(), line.end(), pattern), end; i != end; ++i) {
      all.insert((*i)[1]);
    }
  }
  return all;
}

class Labels : public ::testing::Test {
 protected:
  Labels() {
    // What Bazel lends a test are links into the sources, whose BUILD files know all targets.
    const fs::path sources = fs::canonical("README.md").parent_path();
    quick_ = found(sources / "BUILD", std::regex("\"//(tests/[\\w/]+:\\w+)\","));
    for (const auto& entry : fs::recursive_directory_iterator(sources / "tests")) {
      const fs::path& path = entry.path();
      const std::string folder = fs::relative(path.parent_path(), sources).string();
      if (path.filename() == "BUILD") {
        for (const std::string& name : found(path, std::regex("name = \"([^\"]+)\""))) {
          names_.insert(name);
          labels_.insert(folder + ":" + name);
          if (folder == "tests/fuzz") labels_.insert(folder + ":" + name + "_corpus_test");
        }
      } else if (path.extension() == ".toml" && folder.starts_with("tests/mutants")) {
        mutants_.push_back(path);
      }
    }
  }
  // Such as tests/shard:faults_test, with // or without.
  void expect_labels_exist(const std::string& file) const {
    for (const std::string& label : found(file, std::regex("(tests/[\\w/]*:\\w+)"))) {
      EXPECT_TRUE(labels_.contains(label)) << file << ": " << label;
    }
  }

  std::set<std::string> labels_, names_, quick_;
  std::vector<std::string> mutants_;
};

TEST_F(Labels, OfPagesExist) {
  for (const std::string& page : pages()) {
    expect_labels_exist(page);
    for (const std::string& name : found(page, std::regex("`(\\w+_test)`"))) {
      EXPECT_TRUE(names_.contains(name)) << page << ": " << name;
    }
  }
}

// //:quick is what tests/README.md says of it.
TEST_F(Labels, WithAStarAreQuick) {
  EXPECT_GE(quick_.size(), 8u);
  EXPECT_EQ(found("tests/README.md", std::regex("`//(tests/[\\w/]+:\\w+)`\\\\\\*")), quick_);
}

TEST_F(Labels, OfMutantsExist) {
  EXPECT_GT(mutants_.size(), 100u);
  for (const std::string& file : mutants_) expect_labels_exist(file);
}

}  // namespace
}  // namespace tessera::testing

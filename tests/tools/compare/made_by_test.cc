// What a comparison says of how it was made.
#include "tools/compare/made_by.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::run_program;
using testing::TempFolder;

TEST(MadeBy, ACommandIsAsAShellReadsIt) {
  const std::vector<std::string> words = {"compare", "--sweep=a=1,2", "two words", "it's", "",
                                          "$x"};
  EXPECT_EQ(command_text(words), "compare --sweep=a=1,2 'two words' 'it'\\''s' '' '$x'");
}

TEST(MadeBy, ACommitIsThatOfTheCheckout) {
  const TempFolder folder;
  // Whatever work tree the folder lies in, and whatever the person has set up.
  const std::string above = std::filesystem::path(folder.path()).parent_path().string();
  ::setenv("GIT_CEILING_DIRECTORIES", above.c_str(), 1);
  ::setenv("GIT_CONFIG_GLOBAL", "/dev/null", 1);
  for (const char* name : {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}) ::unsetenv(name);
  EXPECT_EQ(commit_of(folder.path()), nullptr);
  EXPECT_EQ(commit_of(folder / "nowhere's"), nullptr);
  const auto git = [&](std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"git", "-C", folder.path(), "-c", "user.name=a", "-c", "user.email=b"});
    const testing::Outcome outcome = run_program("/usr/bin/env", words);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  };
  git({"init", "-q"});
  EXPECT_EQ(commit_of(folder.path()), nullptr) << "nothing is committed";
  folder.write("file", "one");
  git({"add", "file"});
  git({"commit", "-q", "-m", "one"});
  const ordered_json clean = commit_of(folder.path());
  EXPECT_TRUE(std::regex_match(clean.at("id").get<std::string>(), std::regex("[0-9a-f]{40}")));
  EXPECT_EQ(clean.at("changed"), false);
  folder.write("other", "git does not follow it");
  EXPECT_EQ(commit_of(folder.path()), clean);
  folder.write("file", "two");
  EXPECT_EQ(commit_of(folder.path()).at("id"), clean.at("id"));
  EXPECT_EQ(commit_of(folder.path()).at("changed"), true);
}

TEST(MadeBy, ItIsOfThisProgramOnThisMachine) {
  const std::array<const char*, 2> argv = {"/bin/compare", "--device=cpu"};
  ::unsetenv("BUILD_WORKSPACE_DIRECTORY");
  ordered_json made = made_by(argv);
  EXPECT_EQ(made.at("command"), "/bin/compare --device=cpu");
  EXPECT_EQ(made.at("commit"), nullptr);
  EXPECT_TRUE(std::regex_match(made.at("begun").get<std::string>(),
                               std::regex("20\\d\\d-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d UTC")));
  EXPECT_GE(made.at("usable_cores").get<int>(), 1);
  EXPECT_LE(made.at("usable_cores").get<int>(), made.at("cores").get<int>());
  EXPECT_EQ(made.at("load").size(), 3u);
  EXPECT_GT(made.at("memory_bytes").get<double>(), 1 << 26);
  EXPECT_FALSE(made.at("compiler").get<std::string>().empty());
  ::setenv("BUILD_WORKSPACE_DIRECTORY", "/nowhere", 1);
  made = made_by(argv);
  EXPECT_EQ(made.at("command"), "bazel run //tools:compare -- --device=cpu");
  EXPECT_EQ(made.at("commit"), nullptr);
}

}  // namespace
}  // namespace tessera::tools

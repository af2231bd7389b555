// Files that the pages name are there, and what is to be read by people is not too much at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <regex>
#include <set>
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

// Lines of every C++ file below a folder of the sources.
std::map<fs::path, std::size_t> cpp_lines_below(const std::string& folder) {
  const std::set<std::string> kinds = {".cc", ".h", ".cu", ".cuh"};
  std::map<fs::path, std::size_t> lines;
  for (const auto& entry : fs::recursive_directory_iterator(sources() / folder)) {
    if (kinds.contains(entry.path().extension().string())) {
      lines[entry.path().lexically_relative(sources())] = lines_of(entry.path().string()).size();
    }
  }
  return lines;
}

// Lines that are neither empty nor a comment, nor for the preprocessor; with `function` those from
// its first line on, which it begins, until it ends.
std::size_t code_lines(const std::string& file, const std::string& function = "") {
  const std::regex other("\\s*(//.*)?|#.*");
  std::size_t num_lines = 0;
  bool is_inside = function.empty();
  for (const std::string& line : lines_of((sources() / "examples" / file).string())) {
    is_inside = is_inside || line.starts_with(function);
    if (is_inside && !std::regex_match(line, other)) ++num_lines;
    if (is_inside && !function.empty() && line == "}") return num_lines;
  }
  EXPECT_TRUE(is_inside && function.empty()) << file << " has no whole " << function;
  return num_lines;
}

TEST(Files, RecipesAreShortAndThePageNamesThem) {
  const std::string page = engine::read_text_file("docs/recipes.md", 1 << 20);
  int num_programs = 0;
  for (const auto& [file, num_lines] : cpp_lines_below("examples/recipes")) {
    if (file.extension() != ".cc") continue;
    ++num_programs;
    EXPECT_LT(num_lines, 100u) << file;
    EXPECT_NE(page.find('`' + file.string() + '`'), std::string::npos) << file;
  }
  EXPECT_GE(num_programs, 12);
}

// What a user writes for these is small.
TEST(Files, ModelsOptimizersAndLoopsOfTheExamplesAreShort) {
  EXPECT_LE(code_lines("recipes/llama.h"), 80u);
  EXPECT_LE(code_lines("muon.h"), 40u);
  EXPECT_LE(code_lines("recipes/llama.cc", "std::string go_on(") +
                code_lines("recipes/policy_gradient.cc", "double train("),
            60u);
}

// Functions of a tape that are declared in headers that do not say that they are private.
TEST(Files, ThePageOfOperationsHasThemAll) {
  const std::string page = engine::read_text_file("docs/ops.md", 1 << 20);
  const std::regex declaration(
      "\n(inline )?(engine::Tensor|NormOfSum|MaxOf|Routing|std::vector<engine::Tensor>) (\\w+)\\("
      "engine::Tape& tape");
  int num_ops = 0;
  for (const auto& [file, num_lines] : cpp_lines_below("ops")) {
    if (file.extension() != ".h" || file == "ops/pointwise.h") continue;
    const std::string text = engine::read_text_file((sources() / file).string(), 1 << 20);
    if (text.find("rivate to") != std::string::npos) continue;
    for (std::sregex_iterator i(text.begin(), text.end(), declaration), end; i != end; ++i) {
      ++num_ops;
      const std::string header = file.lexically_relative("ops").string();
      EXPECT_NE(page.find('`' + header + '`'), std::string::npos) << header;
      EXPECT_NE(page.find('`' + (*i)[3].str() + '`'), std::string::npos)
          << header << ": " << (*i)[3];
    }
  }
  EXPECT_GE(num_ops, 50);
}

TEST(Files, NoRoomOfTheToolsIsTooLarge) {
  std::map<fs::path, std::size_t> rooms;
  for (const auto& [file, lines] : cpp_lines_below("tools")) rooms[file.parent_path()] += lines;
  EXPECT_GE(rooms.size(), 20u);
  for (const auto& [room, lines] : rooms) EXPECT_LE(lines, 2500u) << room;
}

// No folder leans on one that leans on it, through others or not; Bazel looks at targets alone.
TEST(Files, NoFoldersOfTheToolsMakeACircle) {
  const std::regex include("#include \"(tools/[^\"]+)/[^/\"]+\"");
  std::map<std::string, std::set<std::string>> leans_on;
  for (const auto& [file, num_lines] : cpp_lines_below("tools")) {
    const std::string folder = file.parent_path().string();
    for (const std::string& line : lines_of((sources() / file).string())) {
      std::smatch found;
      if (std::regex_search(line, found, include) && found[1] != folder) {
        leans_on[folder].insert(found[1]);
      }
    }
  }
  EXPECT_GE(leans_on.size(), 20u);
  // Whoever leans on none that is left is in no circle.
  const auto is_free = [&](const auto& folder) {
    return std::ranges::none_of(folder.second, [&](const auto& f) { return leans_on.contains(f); });
  };
  for (auto i = leans_on.begin(); i != leans_on.end();) {
    i = is_free(*i) ? (leans_on.erase(i), leans_on.begin()) : std::next(i);
  }
  for (const auto& [folder, others] : leans_on) {
    ADD_FAILURE() << folder << " is in a circle, or leans on one";
  }
}

// architecture_test holds the drawing of the rooms against the packages that it is given.
TEST(Files, EveryPackageOfTheToolsIsHeldAgainstTheDrawing) {
  const std::string given =
      engine::read_text_file((sources() / "tests/docs/BUILD").string(), 1 << 20);
  for (const auto& entry : fs::recursive_directory_iterator(sources() / "tools")) {
    if (entry.path().filename() != "BUILD") continue;
    const fs::path package = entry.path().parent_path().lexically_relative(sources());
    EXPECT_NE(given.find("\"//" + package.string() + ":BUILD\""), std::string::npos) << package;
  }
}

TEST(Files, NoTestIsTooLong) {
  const auto files = cpp_lines_below("tests");
  EXPECT_GE(files.size(), 200u);
  for (const auto& [file, lines] : files) EXPECT_LE(lines, 600u) << file;
}

}  // namespace
}  // namespace tessera::testing

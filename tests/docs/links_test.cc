// Links between the pages lead to files and headings that are there.
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <regex>
#include <set>
#include <string>

#include "tests/docs/pages.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// As GitHub names a heading: small letters, no punctuation, hyphens for spaces.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    const auto u = static_cast<unsigned char>(c);
    if (std::isalnum(u) != 0 || c == '-' || c == '_') anchor += static_cast<char>(std::tolower(u));
    if (c == ' ') anchor += '-';
  }
  return anchor;
}

std::set<std::string> anchors_of(const std::string& page) {
  std::set<std::string> anchors;
  for (const std::string& line : lines_of(page)) {
    const std::size_t at = line.find_first_not_of('#');
    if (at == 0 || at == std::string::npos || line[at] != ' ') continue;
    anchors.insert(anchor_of(line.substr(at + 1)));
  }
  return anchors;
}

TEST(Links, LeadSomewhere) {
  // [text](target), where the text may be broken over two lines; code has none.
  const std::regex link("\\]\\(([^()\\s]+)\\)");
  int num_links = 0;
  for (const std::string& page : pages()) {
    bool is_fenced = false;
    for (const std::string& line : lines_of(page)) {
      if (line.starts_with("```")) is_fenced = !is_fenced;
      if (is_fenced || line.starts_with("    ")) continue;
      for (std::sregex_iterator i(line.begin(), line.end(), link), end; i != end; ++i) {
        const std::string target = (*i)[1];
        if (target.starts_with("https://")) continue;
        ++num_links;
        const std::size_t hash = target.find('#');
        const std::string file = target.substr(0, hash);
        const fs::path path = file.empty()
                                  ? fs::path(page)
                                  : (fs::path(page).parent_path() / file).lexically_normal();
        EXPECT_TRUE(fs::exists(path)) << page << ": " << target;
        if (hash == std::string::npos || !fs::exists(path)) continue;
        EXPECT_TRUE(anchors_of(path.string()).contains(target.substr(hash + 1)))
            << page << ": no heading for " << target;
      }
    }
  }
  EXPECT_GE(num_links, 100);
}

// Every page can be found from the map.
TEST(Links, TheMapNamesEveryPage) {
  std::string map;
  for (const std::string& line : lines_of("docs/README.md")) map += line + '\n';
  for (const std::string& page : pages()) {
    const fs::path path(page);
    if (path.parent_path() != "docs" || path.filename() == "README.md") continue;
    EXPECT_NE(map.find("](" + path.filename().string() + ")"), std::string::npos) << page;
  }
}

}  // namespace
}  // namespace tessera::testing

// Holds the lines of C++ that a page shows to those of a program.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "tests/docs/pages.h"

namespace tessera::testing {

/// A line without spaces and what follows //.
inline std::string bare(std::string line) {
  line.erase(std::min(line.find("//"), line.size()));
  std::erase_if(line, [](unsigned char c) { return std::isspace(c) != 0; });
  return line;
}

/// Whether `line` has the parts of `wanted` between each "..." one after the other, both bare.
inline bool has_parts(const std::string& line, std::string_view wanted) {
  std::size_t at = 0;
  while (true) {
    const std::size_t dots = wanted.find("...");
    const std::string_view part = wanted.substr(0, dots);
    at = line.find(part, at);
    if (at == std::string::npos) return false;
    if (dots == std::string_view::npos) return true;
    at += part.size();
    wanted.remove_prefix(dots + 3);
  }
}

/// Expects each indented line of `page` but for commands of Bazel to be part of one of `source`,
/// and more than `num_lines` of them. "..." in the page stands for anything.
inline void expect_shown(const std::string& page, const std::string& source, int num_lines) {
  std::vector<std::string> here = lines_of(source);
  for (std::string& line : here) line = bare(line);
  int num_shown = 0;
  for (const std::string& line : lines_of(page)) {
    const bool is_command =
        line.find("bazel run") != std::string::npos || line.find("bazelw") != std::string::npos;
    if (!line.starts_with("    ") || is_command) continue;
    ++num_shown;
    const std::string wanted = bare(line);
    EXPECT_TRUE(
        std::ranges::any_of(here, [&](const std::string& l) { return has_parts(l, wanted); }))
        << page << ": no line of " << source << " has\n"
        << line;
  }
  EXPECT_GT(num_shown, num_lines) << page;
}

}  // namespace tessera::testing

// The pages that these tests read: README, CONTRIBUTING, tests/README, and all of docs.
#pragma once

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "engine/io/file.h"

namespace tessera::testing {

inline std::vector<std::string> pages() {
  std::vector<std::string> pages = {"README.md", "CONTRIBUTING.md", "tests/README.md"};
  for (const auto& entry : std::filesystem::directory_iterator("docs")) {
    if (entry.path().extension() == ".md") pages.push_back(entry.path().string());
  }
  std::sort(pages.begin(), pages.end());
  return pages;
}

inline std::vector<std::string> lines_of(const std::string& file) {
  std::vector<std::string> lines;
  std::istringstream text(engine::read_text_file(file, 1 << 20));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

/// A block between two lines that begin with ```.
struct Fenced {
  std::string info;  ///< what follows the first ```
  std::vector<std::string> lines = {};
};

inline std::vector<Fenced> fenced_of(const std::string& page) {
  std::vector<Fenced> blocks;
  bool is_inside = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) {
      is_inside = !is_inside;
      if (is_inside) blocks.push_back({line.substr(3)});
    } else if (is_inside) {
      blocks.back().lines.push_back(line);
    }
  }
  return blocks;
}

}  // namespace tessera::testing

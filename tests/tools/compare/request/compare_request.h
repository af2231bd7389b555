// What tests ask compare for: a tiny model on the CPU.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/temp_folder.h"
#include "tools/compare/request/request.h"

namespace tessera::testing {

/// Reads a command line: that of a model of `num_layers` layers, and `more`, which beats it. Writes
/// its data into `folder`. Throws as read_request() does.
inline tools::Request compare_request(const TempFolder& folder, int num_layers,
                                      const std::vector<std::string>& more) {
  folder.write("text.txt", std::string(400, 'a'));
  std::vector<std::string> words = {
      "compare",         "--data.path=" + folder / "text.txt",
      "--model.heads=2", "--model.layers=" + std::to_string(num_layers),
      "--model.dim=8",   "--model.seq=8",
      "--train.batch=1", "--device=cpu"};
  std::erase_if(words, [&](const std::string& word) {
    const std::string option = word.substr(0, word.find('=') + 1);
    return !option.empty() &&
           std::ranges::any_of(more, [&](const auto& m) { return m.starts_with(option); });
  });
  words.insert(words.end(), more.begin(), more.end());
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  std::ostringstream out;
  return tools::read_request(static_cast<int>(argv.size()), argv.data(), out);
}

}  // namespace tessera::testing

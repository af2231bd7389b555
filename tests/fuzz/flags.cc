// Command lines, a line for each argument.
#include "tests/fuzz/options.h"

#include <algorithm>

namespace tessera::fuzz {

const char* const kTarget = "flags";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  std::vector<std::string> arguments;
  std::istringstream lines{std::string(input)};
  for (std::string line; std::getline(lines, line);) {
    // No argument holds a NUL, and what other files say is for the target of TOML.
    line.resize(std::min(line.find('\0'), line.size()));
    if (!line.starts_with("--config")) arguments.push_back(line);
  }
  Options options;
  if (options.parse(arguments)) write_and_read(options, folder);
}

}  // namespace tessera::fuzz

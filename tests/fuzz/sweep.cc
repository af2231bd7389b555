// What compare is told: an argument a line; a line that is no option is a sweep.
#include "tools/compare/request/sweep.h"

#include <set>
#include <sstream>

#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const char* const kTarget = "sweep";

void consume(std::string_view input) {
  std::istringstream lines{std::string(input)};
  for (std::string line; std::getline(lines, line);) {
    const std::string_view text = line;
    if (text.starts_with("configuration ")) {
      tools::folder_name_of(tools::name_of(tools::parse_overrides(text.substr(14))));
      continue;
    }
    const auto all = tools::combinations(tools::parse_sweep(text));
    promise(std::ssize(all) <= tools::kMaxConfigurations, "expected a bounded number");
    promise(std::set(all.begin(), all.end()).size() == all.size(), "expected each once");
    for (const tools::Overrides& overrides : all) {
      const std::string folder = tools::folder_name_of(tools::name_of(overrides));
      promise(!folder.empty() && folder.find('/') == std::string::npos && !folder.starts_with('.'),
              "expected the name of a folder");
    }
  }
}

}  // namespace tessera::fuzz

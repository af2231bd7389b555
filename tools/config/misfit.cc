#include "tools/config/misfit.h"

#include <fmt/format.h>

#include <map>
#include <sstream>

namespace tessera::tools {

std::string with_changes(std::string error, const std::vector<std::string>& changes) {
  for (const std::string& change : changes) error += "\n  changed since it was saved: " + change;
  return error;
}

std::string misfit_text(const std::string& error, const std::vector<std::string>& changes) {
  constexpr int kMostOfAKind = 4;
  std::map<std::string, int> num_of_kind;
  std::vector<std::string> lines;
  int num_more = 0;
  bool are_states = true;  // all that differ: the optimizer's and the hook's
  std::istringstream rest(error);
  for (std::string line; std::getline(rest, line);) {
    const bool is_listed = line.starts_with("  ") && !line.starts_with("  (");
    if (is_listed) {
      const std::string kind = line.substr(0, line.find(' ', 2));  // "  missing:", "  parameter"
      const bool is_value =
          line.starts_with(kind + " parameter ") || line.starts_with(kind + " buffer ");
      are_states = are_states && kind.ends_with(':') && !is_value;
      if (++num_of_kind[kind] > kMostOfAKind) {
        ++num_more;
        continue;
      }
    } else if (num_more > 0) {
      lines.push_back(fmt::format("  {} more", num_more));
      num_more = 0;
    }
    lines.push_back(line);
  }
  if (num_of_kind.empty()) return error;
  std::string text = with_changes(fmt::format("{}", fmt::join(lines, "\n")), changes);
  if (are_states) {
    text +=
        "\n  --checkpoint.strict=false starts what is missing from nothing, and ignores what is "
        "over";
  }
  return text;
}

}  // namespace tessera::tools

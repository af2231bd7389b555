#include "tools/launch/equal_processes.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string_view>
#include <vector>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "engine/memory.h"

namespace tessera::tools {
namespace {

// The lines by what they name, with their section.
std::map<std::string, std::string> settings_of(std::string_view text) {
  std::map<std::string, std::string> settings;
  std::string section;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.starts_with('[')) {
      section = std::string(line.substr(1, line.find(']') - 1)) + ".";
    } else if (const std::size_t end = line.find(" = "); end != std::string_view::npos) {
      settings[section + std::string(line.substr(0, end))] = line.substr(end + 3);
    }
  }
  return settings;
}

std::string value_in(const std::map<std::string, std::string>& settings, const std::string& name) {
  const auto found = settings.find(name);
  return found == settings.end() ? "none" : found->second;
}

}  // namespace

void check_equal_processes(comm::ProcessGroup& world, const std::string& text) {
  const engine::Stream stream = engine::Stream::inline_cpu("launch");
  const std::vector<std::string> texts =
      comm::gather_texts(world, text, engine::Memory(), stream, "what each process does");
  const auto first = settings_of(texts[0]);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    auto names = settings_of(texts[r]);
    const auto own = names;
    names.insert(first.begin(), first.end());
    for (const auto& [name, value] : names) {
      engine::require(value_in(own, name) == value_in(first, name),
                      "[launch] expected {} = {} in every process, as rank 0 has it, got {} (rank "
                      "{})",
                      name, value_in(first, name), value_in(own, name), r);
    }
  }
}

}  // namespace tessera::tools

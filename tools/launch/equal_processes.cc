#include "tools/launch/equal_processes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/host_gather.h"
#include "engine/memory.h"

namespace tessera::tools {
namespace {

using Settings = std::vector<std::pair<std::string, std::string>>;

// What the lines name, with their section, and its value.
Settings settings_of(std::string_view text) {
  Settings settings;
  std::string section;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.starts_with('[')) {
      section = std::string(line.substr(1, line.find(']') - 1)) + ".";
    } else if (const std::size_t end = line.find(" = "); end != std::string_view::npos) {
      settings.emplace_back(section + std::string(line.substr(0, end)), line.substr(end + 3));
    }
  }
  return settings;
}

std::string value_in(const Settings& settings, const std::string& name) {
  const auto found = std::ranges::find(settings, name, &Settings::value_type::first);
  return found == settings.end() ? "none" : found->second;
}

}  // namespace

std::string difference_of_processes(comm::ProcessGroup& world, const engine::Stream& stream,
                                    const std::string& text) {
  const std::vector<std::string> texts =
      comm::gather_texts(world, text, engine::Memory(stream), stream, "what each process does");
  const Settings first = settings_of(texts[0]);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const Settings own = settings_of(texts[r]);
    Settings all = first;
    all.insert(all.end(), own.begin(), own.end());
    for (const auto& [name, ignored] : all) {
      const std::string expected = value_in(first, name), got = value_in(own, name);
      if (expected == got) continue;
      return fmt::format(
          "[launch] expected {} = {} in every process, as rank 0 has it, got {} (rank {})", name,
          expected, got, r);
    }
  }
  return "";
}

}  // namespace tessera::tools

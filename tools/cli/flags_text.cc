// What a FlagSet says of its options: --help, TOML, JSON.
#include <fmt/format.h>

#include <algorithm>

#include "tools/cli/flags.h"
#include "tools/cli/option_names.h"

namespace tessera::tools {

template <class Visit>
void FlagSet::visit_sections(Visit visit) const {
  std::vector<std::string_view> sections{""};
  for (const Option& option : options_) {
    const auto section = section_of(option.name);
    if (std::ranges::count(sections, section) == 0) sections.push_back(section);
  }
  for (const auto section : sections) {
    std::vector<const Option*> members;
    for (const Option& option : options_) {
      if (section_of(option.name) == section) members.push_back(&option);
    }
    if (!members.empty()) visit(section, members);
  }
}

std::string FlagSet::help() const {
  std::string text = fmt::format(
      "{}\n\nUsage: {} [--config FILE.toml] [--name=value ...]\n"
      "Options, with their defaults; FILE.toml has the same names, and flags beat it:\n",
      about_, program_);
  visit_sections([&](std::string_view section, const std::vector<const Option*>& members) {
    text += section.empty() ? "\n" : fmt::format("\n[{}]\n", section);
    for (const Option* option : members) {
      text += fmt::format("  --{}={}\n      {} ({})\n", option->name, option->initial, option->help,
                          option->allowed);
    }
  });
  return text + "\n  --help, --version\n";
}

std::string FlagSet::to_toml() const {
  std::string text;
  visit_sections([&](std::string_view section, const std::vector<const Option*>& members) {
    if (!section.empty()) text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
    for (const Option* option : members) {
      text += fmt::format("{} = {}\n", key_of(option->name), option->literal());
    }
  });
  return text;
}

std::string FlagSet::to_json() const {
  std::string text;
  for (const Option& option : options_) {
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", engine::json_literal(option.name),
                        option.literal());
  }
  return "{" + text + "}";
}

}  // namespace tessera::tools

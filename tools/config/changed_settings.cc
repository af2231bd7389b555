#include "tools/config/changed_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <sstream>

namespace tessera::tools {
namespace {

// What neither computes nor says who does: outputs, and the machine.
constexpr std::string_view kNotCompared[] = {
    "out", "plan",    "audit", "rates",         "resume",       "checkpoint", "device",
    "cpu", "offload", "log",   "memory_budget", "memory_check", "save",       "sample"};
// Options that changed_settings() leaves out, as a run compares the number of ranks and the data
// themselves.
constexpr std::string_view kToldOtherwise[] = {"parallel.ranks", "parallel.threads",
                                               "parallel.cpu_ranks", "data.path", "data.mix"};
constexpr std::string_view kMovesSamples[] = {
    "data.end=",          "data.field=",  "data.format=",  "data.loss=",     "data.order=",
    "data.packing=",      "data.prompt=", "data.special=", "data.template=", "data.tokenizer=",
    "data.val_fraction=", "model.seq=",   "train.seed="};

/// "section.key" to value.
std::map<std::string, std::string> settings_of(std::string_view toml) {
  std::map<std::string, std::string> settings;
  std::istringstream lines{std::string(toml)};
  std::string section;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('[') && line.ends_with(']')) {
      section = line.substr(1, line.size() - 2);
    } else if (const auto equals = line.find(" = "); equals != std::string::npos) {
      settings[fmt::format("{}{}{}", section, section.empty() ? "" : ".", line.substr(0, equals))] =
          line.substr(equals + 3);
    }
  }
  return settings;
}

template <class IsTold>
std::vector<std::string> changes_of(std::string_view before, std::string_view now, IsTold is_told) {
  const std::map<std::string, std::string> old = settings_of(before);
  std::vector<std::string> changes;
  for (const auto& [name, value] : settings_of(now)) {
    const auto found = old.find(name);
    if (found == old.end() || found->second == value || !is_told(name)) continue;
    changes.push_back(fmt::format("{}={} (was {})", name, value, found->second));
  }
  return changes;
}

}  // namespace

std::vector<std::string> changed_values(std::string_view before, std::string_view now) {
  return changes_of(before, now, [](const std::string&) { return true; });
}

std::vector<std::string> changed_settings(std::string_view before, std::string_view now) {
  return changes_of(before, now, [](std::string_view name) {
    const std::string_view section = name.substr(0, name.find('.'));
    return std::ranges::find(kNotCompared, section) == std::end(kNotCompared) &&
           std::ranges::find(kToldOtherwise, name) == std::end(kToldOtherwise);
  });
}

bool moves_samples(const std::vector<std::string>& changes) {
  return std::ranges::any_of(changes, [](std::string_view change) {
    return std::ranges::any_of(kMovesSamples,
                               [&](std::string_view name) { return change.starts_with(name); });
  });
}

}  // namespace tessera::tools

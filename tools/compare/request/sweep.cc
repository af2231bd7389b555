#include "tools/compare/request/sweep.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <set>
#include <system_error>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/placement.h"
#include "tools/cli/flags.h"
#include "tools/planning/strategy_list.h"

namespace tessera::tools {
namespace {

using engine::require;

// Not without the empty pieces: they are errors.
std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> pieces;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    pieces.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return pieces;
}

// Each configuration has files of its own.
bool is_output(std::string_view key) {
  return key == "out" || key == "config" || key.starts_with("save.") || key.starts_with("log.");
}

}  // namespace

SweepAxis parse_axis(std::string_view key, std::string_view values) {
  SweepAxis axis{std::string(key), split(values, ',')};
  std::set<std::string> seen;
  for (const std::string& value : axis.values) {
    require(!value.empty(), "[sweep] expected values between commas, got an empty one ({}={})",
            engine::excerpt(key), engine::excerpt(values));
    require(seen.insert(value).second, "[sweep] expected each value once, got {} twice ({})",
            engine::excerpt(value), engine::excerpt(key));
  }
  return axis;
}

std::vector<SweepAxis> parse_sweep(std::string_view text, bool only_plans) {
  std::vector<SweepAxis> axes;
  std::set<std::string> keys;
  for (const std::string& word : split(text, ' ')) {
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    require(equals != std::string::npos && equals > 0,
            "[sweep] expected key=value,value such as parallel.prefetch=0,1,2, got {}",
            engine::excerpt(word));
    const std::string key = word.substr(0, equals);
    require(keys.insert(key).second, "[sweep] expected each option once, got {} twice",
            engine::excerpt(key));
    require(!is_output(key),
            "[sweep] expected an option of the training, got {}, which says what is written",
            engine::excerpt(key));
    require(only_plans || !key.starts_with("rates."),
            "[sweep] expected an option of the training, got {}, which changes plans alone: add "
            "--plan",
            engine::excerpt(key));
    axes.push_back(parse_axis(key, word.substr(equals + 1)));
  }
  return axes;
}

std::vector<Overrides> combinations(std::span<const SweepAxis> axes) {
  std::vector<Overrides> all{{}};
  for (const SweepAxis& axis : axes) {
    std::vector<Overrides> longer;
    for (const Overrides& overrides : all) {
      for (const std::string& value : axis.values) {
        longer.push_back(overrides);
        longer.back().emplace_back(axis.key, value);
        require(std::ssize(longer) <= kMaxConfigurations,
                "[sweep] expected at most {} configurations, got more (at {})", kMaxConfigurations,
                engine::excerpt(axis.key));
      }
    }
    all = std::move(longer);
  }
  return all;
}

Overrides parse_overrides(std::string_view text) {
  Overrides overrides;
  for (const std::string& word : split(text, ' ')) {
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    const bool is_strategy = equals == std::string::npos;
    const std::string key = is_strategy ? "parallel.strategy" : word.substr(0, equals);
    require(!is_output(key),
            "[find-divergence] expected an option of the training, got {}, which says what is "
            "written",
            engine::excerpt(key));
    for (const auto& [other, value] : overrides) {
      require(other != key, "[find-divergence] expected each option once, got {} twice",
              engine::excerpt(key));
    }
    overrides.emplace_back(key, is_strategy ? word : word.substr(equals + 1));
  }
  return overrides;
}

bool is_record_path(const std::string& text) {
  // A folder may be called as a strategy is: ./ddp means that one.
  const std::vector<std::string>& strategies = shard::Placement::preset_names();
  if (text.empty() || std::ranges::find(strategies, text) != strategies.end()) return false;
  std::error_code ignored;
  if (text.ends_with(".jsonl") || std::filesystem::exists(resolve_user_path(text), ignored)) {
    return true;
  }
  return text.find('/') != std::string::npos && text.find('=') == std::string::npos;
}

std::string record_path(const std::string& text) {
  const std::string path = resolve_user_path(text);
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored) ? path + "/probe.jsonl" : path;
}

Overrides options_of(const Overrides& overrides) {
  Overrides options;
  for (const auto& [key, value] : overrides) {
    if (key != "parallel.strategy") {
      options.emplace_back(key, value);
      continue;
    }
    const StrategyChoice choice = parse_strategy(value);
    options.emplace_back(key, choice.strategy);
    if (choice.shard_ranks > 0) {
      options.emplace_back("parallel.shard_ranks", std::to_string(choice.shard_ranks));
    }
  }
  return options;
}

std::string name_of(const Overrides& overrides) {
  constexpr std::string_view kCommon = "parallel.";
  std::string name;
  for (const auto& [key, value] : overrides) {
    if (!name.empty()) name += ' ';
    if (key != "parallel.strategy") {
      name += key.starts_with(kCommon) ? key.substr(kCommon.size()) : key;
      name += '=';
    }
    name += value;
  }
  return name.empty() ? "as given" : name;
}

std::string folder_name_of(std::string_view name) {
  std::string result(name);
  for (char& c : result) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) == 0 && std::string_view(".=-_").find(c) == std::string_view::npos) {
      c = '_';
    }
  }
  return result.starts_with('.') ? "_" + result : result;
}

}  // namespace tessera::tools

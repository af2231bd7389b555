#include "tools/compare/request/arguments.h"

#include <fmt/format.h>

#include <string_view>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::require;

bool is_option(std::string_view argument, std::string_view name) {
  return argument == name || (argument.starts_with(name) && argument[name.size()] == '=');
}

// The values of the option at `i`, which is moved to the last argument that it takes.
std::vector<std::string> values_at(std::span<const char* const> arguments, std::size_t& i,
                                   std::size_t count) {
  const std::string_view argument = arguments[i];
  std::vector<std::string> values;
  const std::size_t equals = argument.find('=');
  if (equals != std::string_view::npos) values.emplace_back(argument.substr(equals + 1));
  while (values.size() < count && i + 1 < arguments.size() &&
         !std::string_view(arguments[i + 1]).starts_with("--")) {
    values.emplace_back(arguments[++i]);
  }
  return values;
}

}  // namespace

std::vector<std::string> joined_arguments(std::span<const char* const> arguments) {
  std::vector<std::string> result;
  std::string sweep;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (is_option(argument, "--sweep")) {
      const std::vector<std::string> values = values_at(arguments, i, 1);
      require(!values.empty(), "[sweep] expected key=value,value, got nothing");
      require(values[0].find('=') != std::string::npos,
              "[sweep] expected key=value,value such as parallel.prefetch=0,1,2, got {}",
              engine::excerpt(values[0]));
      if (!sweep.empty()) sweep += ' ';
      sweep += values[0];
    } else if (is_option(argument, "--find-divergence") ||
               is_option(argument, "--find_divergence")) {
      const std::vector<std::string> values = values_at(arguments, i, 2);
      require(values.size() == 2,
              "[find-divergence] expected two configurations or two records, such as "
              "parallel.strategy=ddp parallel.strategy=zero3, got {}",
              values.empty() ? "none" : "only " + engine::excerpt(values[0]));
      result.push_back(
          fmt::format("--find_divergence={}{}{}", values[0], kPairSeparator, values[1]));
    } else {
      result.emplace_back(argument);
    }
  }
  if (!sweep.empty()) result.push_back("--sweep=" + sweep);
  return result;
}

std::vector<std::string> without(const std::vector<std::string>& arguments,
                                 const std::string& key) {
  std::vector<std::string> result;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!is_option(arguments[i], "--" + key)) {
      result.push_back(arguments[i]);
      continue;
    }
    const bool has_value = arguments[i].find('=') != std::string::npos;
    const bool takes_next =
        !has_value && i + 1 < arguments.size() && !arguments[i + 1].starts_with("--");
    i += takes_next ? 1 : 0;
  }
  return result;
}

}  // namespace tessera::tools

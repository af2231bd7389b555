#include "tools/cli/flags.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <set>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/option_names.h"
#include "tools/cli/toml_file.h"
#include "tools/machine/environment_variable.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::require;

constexpr std::size_t kMaxTextNbytes = 8192;  // twice the longest path

/// The whole of `text` as a number, in the shape that from_chars knows and no other.
template <class T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string range_of(const IntegerOption& option) {
  using Limits = std::numeric_limits<std::int64_t>;
  if (option.min == Limits::min() && option.max == Limits::max()) return "an integer of 64 bits";
  if (option.max == Limits::max()) return fmt::format("an integer >= {} of 64 bits", option.min);
  if (option.min == Limits::min()) return fmt::format("an integer <= {} of 64 bits", option.max);
  return fmt::format("an integer in [{}, {}]", option.min, option.max);
}

std::string range_of(const NumberOption& option) {
  const bool has_min = std::isfinite(option.min), has_max = std::isfinite(option.max);
  const char* const width = option.is_f32 ? " of 32 bits" : "";
  if (has_min && has_max) {
    return fmt::format("{}a number in {}{}, {}{}{}", option.or_zero ? "0 or " : "",
                       option.above_min ? "(" : "[", option.min, option.max,
                       option.below_max ? ")" : "]", width);
  }
  if (has_min)
    return fmt::format("a finite number {} {}{}", option.above_min ? ">" : ">=", option.min, width);
  if (has_max)
    return fmt::format("a finite number {} {}{}", option.below_max ? "<" : "<=", option.max, width);
  return fmt::format("a finite number{}", width);
}

}  // namespace

std::string with_home(std::string_view path) {
  if (!path.starts_with('~')) return std::string(path);
  const std::string_view name = path.substr(0, path.find('/'));
  require(name == "~",
          "[path] expected ~ or ~/ for your own home folder, got {}: write the whole path of "
          "another's, and ./{} for a name that begins so ({})",
          name, name, path);
  std::string home = environment_variable("HOME").value_or("");
  if (home.empty()) {
    const passwd* user = ::getpwuid(::getuid());
    home = user == nullptr ? "" : user->pw_dir;
  }
  require(home.starts_with('/'), "[path] expected $HOME to be a folder's path for ~, got '{}' ({})",
          home, path);
  return home + std::string(path.substr(1));
}

std::string resolve_user_path(std::string_view typed) {
  const std::string path = with_home(typed);
  const auto folder = environment_variable("BUILD_WORKING_DIRECTORY");
  if (path.empty() || path.front() == '/' || !folder) return path;
  return (std::filesystem::path(*folder) / path).string();
}

FlagSet::FlagSet(std::string program, std::string about, std::string version)
    : program_(std::move(program)), about_(std::move(about)), version_(std::move(version)) {}

void FlagSet::add_option(Option option) {
  const std::string& name = option.name;
  const bool is_path =
      !name.empty() && !name.starts_with('.') && !name.ends_with('.') &&
      name.find("..") == std::string::npos &&
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.") == std::string::npos;
  require(is_path, "[flags] expected a name such as train.steps, got {}", name);
  require(name != "config" && name != "help" && name != "version",
          "[flags] expected a name that is free, got {}", name);
  for (const Option& other : options_) {
    require(name != other.name && !name.starts_with(other.name + ".") &&
                !other.name.starts_with(name + "."),
            "[flags] expected a name apart from {}, got {}", other.name, name);
  }
  option.initial = option.literal();
  options_.push_back(std::move(option));
}

void FlagSet::add(std::string name, bool* field, BoolOption option) {
  const auto set = [field](const Value& value) {
    *field = std::get<bool>(value);
    return true;
  };
  add_option({std::move(name), Type::kBool, std::move(option.help), "true or false", set,
              [field] { return engine::json_literal(*field); }});
}

void FlagSet::add_switch(std::string name, std::int64_t* field, std::string help,
                         std::int64_t max) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  const auto set = [field, max](const Value& value) {
    if (const bool* all = std::get_if<bool>(&value)) {
      *field = *all ? kAll : 0;
      return true;
    }
    const std::int64_t number = std::get<std::int64_t>(value);
    if (number < 1 || number > max) return false;
    *field = number;
    return true;
  };
  add_option({std::move(name), Type::kSwitch, std::move(help),
              fmt::format("true or false, or 1 to {}", max), set, [field] {
                return *field == 0 || *field == kAll ? engine::json_literal(*field == kAll)
                                                     : engine::json_literal(*field);
              }});
}

void FlagSet::add_integer(std::string name, IntegerOption option,
                          std::function<void(std::int64_t)> set, Literal literal) {
  const auto checked_set = [min = option.min, max = option.max,
                            set = std::move(set)](const Value& value) {
    const std::int64_t integer = std::get<std::int64_t>(value);
    if (integer < min || integer > max) return false;
    set(integer);
    return true;
  };
  std::string range = range_of(option);
  add_option({std::move(name), Type::kInteger, std::move(option.help), std::move(range),
              checked_set, std::move(literal)});
}

void FlagSet::add(std::string name, double* field, const NumberOption& option) {
  const auto is_in_range = [option](double number) {
    const bool above = option.above_min ? number > option.min : number >= option.min;
    const bool below = option.below_max ? number < option.max : number <= option.max;
    return (option.or_zero && number == 0) || (std::isfinite(number) && above && below);
  };
  const auto set = [field, is_in_range, is_f32 = option.is_f32](const Value& value) {
    const double number = std::get<double>(value);
    if (!is_in_range(number)) return false;
    if (is_f32 && !is_in_range(static_cast<float>(number))) return false;
    *field = number;
    return true;
  };
  add_option({std::move(name), Type::kNumber, option.help, range_of(option), set,
              [field] { return engine::json_literal(*field); }});
}

void FlagSet::add(std::string name, std::string* field, TextOption option) {
  add_text(
      std::move(name), std::move(option), [field](const std::string& text) { *field = text; },
      [field] { return engine::json_literal(*field); });
}

void FlagSet::add_text(std::string name, TextOption option,
                       std::function<void(const std::string&)> set, Literal literal) {
  const auto is_choice = [choices = option.choices,
                          max_number = option.max_number](const std::string& text) {
    std::int64_t number = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    const bool is_number = error == std::errc() && rest == end && text.front() != '0';
    return (is_number && number >= 1 && number <= max_number) ||
           std::ranges::count(choices, text) > 0;
  };
  const auto checked_set = [is_choice, any = option.choices.empty(),
                            set = std::move(set)](const Value& value) {
    const std::string& text = std::get<std::string>(value);
    // Anything else could not be written to a file and read back, and no path holds a NUL.
    const bool is_text = text.size() <= kMaxTextNbytes && engine::is_utf8(text) &&
                         text.find('\0') == std::string::npos;
    if (any ? !is_text : !is_choice(text)) return false;
    set(text);
    return true;
  };
  std::string allowed =
      option.choices.empty()
          ? fmt::format("text: at most {} bytes of UTF-8 without NUL", kMaxTextNbytes)
          : fmt::format("one of {}", engine::join(option.choices, ", "));
  if (option.max_number > 0) allowed += fmt::format(", or 1 to {}", option.max_number);
  add_option({std::move(name), Type::kText, std::move(option.help), std::move(allowed), checked_set,
              std::move(literal), !option.choices.empty()});
}

const FlagSet::Option& FlagSet::find(std::string_view name, std::string_view source) const {
  std::vector<std::string_view> names;
  for (const Option& option : options_) {
    if (option.name == name) return option;
    names.push_back(option.name);
  }
  const std::string_view nearest = nearest_name(name, names);
  const std::string hint =
      nearest.empty() ? "; --help lists all options" : fmt::format("; did you mean {}?", nearest);
  fail("[{}] expected a known option, got {} ({}){}", program_, engine::excerpt(name), source,
       hint);
}

void FlagSet::set(const Option& option, const std::optional<Value>& value, std::string_view shown,
                  std::string_view source) const {
  require(value.has_value() && option.set(*value), "[{}] expected {}, got {} ({})", program_,
          option.allowed, shown, source);
}

std::optional<FlagSet::Value> FlagSet::value_of(const Option& option, const TomlEntry& entry) {
  const auto* boolean = std::get_if<bool>(&entry.value);
  const auto* integer = std::get_if<std::int64_t>(&entry.value);
  const auto* number = std::get_if<double>(&entry.value);
  const auto* text = std::get_if<std::string>(&entry.value);
  switch (option.type) {
    case Type::kBool:
      if (boolean != nullptr) return *boolean;
      break;
    case Type::kSwitch:
      if (boolean != nullptr) return *boolean;
      [[fallthrough]];
    case Type::kInteger:
      if (integer != nullptr) return *integer;
      break;
    case Type::kNumber:
      if (number != nullptr) return *number;
      if (integer != nullptr) return static_cast<double>(*integer);
      break;
    case Type::kText:
      if (text != nullptr) return *text;
      // Among choices, `true` and numbers may stand without quotes.
      if (boolean != nullptr && option.has_choices) return *boolean ? "true" : "false";
      if (integer != nullptr && option.has_choices) return std::to_string(*integer);
      break;
  }
  return std::nullopt;
}

void FlagSet::load_file(const std::string& path) const {
  const auto is_section = [&](const std::string& name) {
    return std::ranges::any_of(
        options_, [&](const Option& option) { return option.name.starts_with(name + "."); });
  };
  std::set<std::string> seen;
  visit_toml_file(path, program_, [&](const TomlEntry& entry) {
    const std::string source =
        fmt::format("{}:{}: {}", engine::escaped(path), entry.line, engine::excerpt(entry.name));
    if (is_section(entry.name)) {
      require(entry.is_table, "[{}] expected a table of options, got {} ({})", program_,
              entry.shown, source);
      return;  // an empty one
    }
    const Option& option = find(entry.name, source);
    require(seen.insert(entry.name).second, "[{}] expected each option once, got a second ({})",
            program_, source);
    const bool is_quoted =
        option.type != Type::kText && std::holds_alternative<std::string>(entry.value);
    set(option, value_of(option, entry), (is_quoted ? "the string " : "") + entry.shown, source);
  });
}

bool FlagSet::parse(std::span<const char* const> arguments, std::ostream& out) {
  struct Given {
    const Option* option;
    std::string text;
    std::string flag;
  };
  std::vector<Given> given;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      out << help();
      return false;
    }
    if (argument == "--version") {
      out << program_ << " " << version_ << "\n";
      return false;
    }
    const auto equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    require(flag.starts_with("--"), "[{}] expected --name=value, got {}", program_,
            engine::excerpt(argument));
    const std::string name = flag.substr(2);
    const Option* option = name == "config" ? nullptr : &find(name, engine::excerpt(flag));
    require(seen.insert(name).second, "[{}] expected each option once, got a second ({})", program_,
            engine::excerpt(argument));
    std::string text = "true";
    if (equals != std::string::npos) {
      text = argument.substr(equals + 1);
    } else if (option == nullptr ||
               (option->type != Type::kBool && option->type != Type::kSwitch)) {
      require(i + 1 < arguments.size() && !std::string_view(arguments[i + 1]).starts_with("--"),
              "[{}] expected {}, got no value ({})", program_,
              option == nullptr ? "a file" : option->allowed, flag);
      text = arguments[++i];
    }
    if (option == nullptr) {
      require(!text.empty(), "[{}] expected a file, got no value ({})", program_, flag);
      config_path_ = resolve_user_path(text);
    } else {
      given.push_back({option, std::move(text), flag});
    }
  }
  if (!config_path_.empty()) load_file(config_path_);
  for (const auto& [option, text, flag] : given) {
    std::optional<Value> value;
    switch (option->type) {
      case Type::kBool:
      case Type::kSwitch:
        if (text == "true" || text == "false") value = text == "true";
        if (value || option->type == Type::kBool) break;
        [[fallthrough]];
      case Type::kInteger:
        if (const auto integer = parse_number<std::int64_t>(text)) value = *integer;
        break;
      case Type::kNumber:
        if (const auto number = parse_number<double>(text)) value = *number;
        break;
      case Type::kText:
        value = text;
        break;
    }
    if (!value && option->type != Type::kBool) {
      if (const auto entry = toml_number(text)) value = value_of(*option, *entry);
    }
    set(*option, value, fmt::format("\"{}\"", engine::excerpt(text)), flag);
    given_.insert(option->name);
  }
  return true;
}

bool FlagSet::parse(int argc, const char* const* argv, std::ostream& out) {
  return parse(std::span(argv, static_cast<std::size_t>(argc)).subspan(argc > 0 ? 1 : 0), out);
}

}  // namespace tessera::tools

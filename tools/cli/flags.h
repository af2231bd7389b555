// Options of a program: one set of names for flags and for TOML files, each bound to a field of the
// program's own configuration.
//
//   FlagSet flags("train_transformer", "Trains a GPT-2 style transformer.");
//   flags.add("model.layers", &config.layers, {.help = "blocks", .min = 1, .max = 1000});
//   flags.add("parallel.strategy", &config.strategy, {.help = "...", .choices = {"ddp", "zero3"}});
//   if (!flags.parse(argc, argv, std::cout)) return 0;    // --help, --version
//
// --model.layers=4, --model.layers 4 and, after --config FILE, "[model]\nlayers = 4" in FILE are
// the same. A flag beats the file, the file beats the field's initial value.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "engine/io/json.h"

namespace tessera::tools {

struct TomlEntry;  // toml_file.h

/// `path` with the person's home folder ($HOME) for a ~ at its head, as shells write it, which
/// leave the ~ of --out=~/x alone. Throws InvalidArgument for ~user, and where no home is known.
std::string with_home(std::string_view path);
/// Where a path that a person typed leads: with_home(), and relative to the folder they stand in,
/// which `bazel run` leaves in $BUILD_WORKING_DIRECTORY. Empty and absolute paths stay as they are.
std::string resolve_user_path(std::string_view path);

struct BoolOption {
  std::string help;
};
struct IntegerOption {
  std::string help;
  std::int64_t min = std::numeric_limits<std::int64_t>::min();
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
};
/// Values are always finite.
struct NumberOption {
  std::string help;
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  ///< min itself is out
  bool below_max = false;  ///< max itself is out
  bool or_zero = false;    ///< 0 is allowed too, outside of the range
  bool is_f32 = false;     ///< used rounded to f32, which must be in range as well
};
struct TextOption {
  std::string help;
  std::vector<std::string> choices = {};  ///< empty: any UTF-8 without NUL, up to 8192 bytes
  std::int64_t max_number = 0;            ///< besides choices, whole numbers from 1 to this
};
template <class E>
struct EnumOption {
  std::string help;
  std::vector<std::pair<std::string, E>> choices;
};

class FlagSet {
 public:
  FlagSet(std::string program, std::string about, std::string version = "0.1.0");

  /// Each binds `name`, a path such as "train.steps", to a field that outlives this object; what
  /// the field holds now is the default. Throws InvalidArgument for a name that is taken.
  void add(std::string name, bool* field, BoolOption option);
  template <std::integral T>
  void add(std::string name, T* field, IntegerOption option) {
    // The field's own range, as far as 64 bits with a sign can express it.
    using Limits = std::numeric_limits<T>;
    if (std::cmp_less(option.min, Limits::min())) option.min = Limits::min();
    if (std::cmp_greater(option.max, Limits::max())) option.max = Limits::max();
    add_integer(
        std::move(name), std::move(option),
        [field](std::int64_t value) { *field = static_cast<T>(value); },
        [field] { return engine::json_literal(*field); });
  }
  void add(std::string name, double* field, const NumberOption& option);
  void add(std::string name, std::string* field, TextOption option);
  /// A number of things from 1 to `max`, none (false: 0) or all (true, and the flag alone: the
  /// largest of 64 bits).
  void add_switch(std::string name, std::int64_t* field, std::string help, std::int64_t max);
  template <class E>
  requires std::is_enum_v<E>
  void add(std::string name, E* field, EnumOption<E> option) {
    std::vector<std::string> names;
    for (const auto& choice : option.choices) names.push_back(choice.first);
    add_text(
        std::move(name), {option.help, std::move(names)},
        [field, choices = option.choices](const std::string& text) {
          for (const auto& [choice, value] : choices) {
            if (choice == text) *field = value;
          }
        },
        [field, choices = option.choices] {
          for (const auto& [choice, value] : choices) {
            if (value == *field) return engine::json_literal(choice);
          }
          return engine::json_literal("");
        });
  }

  /// Sets the fields. False when the program should end now, after printing help or version to
  /// `out`. Throws InvalidArgument naming the flag, or file, line and key: unknown (with a
  /// suggestion), given twice, of a wrong type, out of range; IoError for a file that cannot be
  /// read or is not TOML.
  bool parse(std::span<const char* const> arguments, std::ostream& out);
  /// Parses argv but for argv[0]; see the other parse().
  bool parse(int argc, const char* const* argv, std::ostream& out);

  /// Was the option on the command line? One in a file does not count: to_toml() lists them all.
  bool is_given(std::string_view name) const { return given_.contains(name); }

  /// The file of --config; empty: none was given.
  const std::string& config_path() const { return config_path_; }

  std::string help() const;
  /// The values in force: a file that --config takes, and one JSON object of name to value.
  std::string to_toml() const;
  std::string to_json() const;

 private:
  using Value = std::variant<bool, std::int64_t, double, std::string>;
  enum class Type { kBool, kSwitch, kInteger, kNumber, kText };
  struct Option {
    std::string name;
    Type type;
    std::string help;
    std::string allowed;                    // "an integer in [1, 64]"
    std::function<bool(const Value&)> set;  // false: not allowed
    std::function<std::string()> literal;   // the value in force, as JSON and as TOML
    bool has_choices = false;               // of text
    std::string initial = {};               // its literal before parse()
  };
  using Literal = std::function<std::string()>;

  void add_integer(std::string name, IntegerOption option, std::function<void(std::int64_t)> set,
                   Literal literal);
  void add_text(std::string name, TextOption option, std::function<void(const std::string&)> set,
                Literal literal);
  void add_option(Option option);

  /// `source` is where the name stands, for the error.
  const Option& find(std::string_view name, std::string_view source) const;
  void set(const Option& option, const std::optional<Value>& value, std::string_view shown,
           std::string_view source) const;
  static std::optional<Value> value_of(const Option& option, const TomlEntry& entry);
  void load_file(const std::string& path) const;
  template <class Visit>
  void visit_sections(Visit visit) const;

  std::string program_;
  std::string about_;
  std::string version_;
  std::string config_path_;
  std::vector<Option> options_;
  std::set<std::string, std::less<>> given_;
};

}  // namespace tessera::tools

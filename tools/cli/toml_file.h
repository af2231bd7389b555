// A TOML file as a list of names and values.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

namespace tessera::tools {

struct TomlEntry {
  std::string name;  ///< with those of the tables that it is in: "train.steps"
  unsigned line = 0;
  /// Nothing: an array, a date or an empty table.
  std::variant<std::monostate, bool, std::int64_t, double, std::string> value;
  bool is_table = false;  ///< an empty one; of others the entries are visited
  std::string shown;      ///< the value for an error: "'text'", "3", "an array"
};

/// Visits the entries of the file at `path`, one at a time: a table may have a long name, and many
/// keys. Throws IoError that begins with [where] and names path and line: a file that cannot be
/// read, is larger than 1 MiB, beyond check_toml_limits() or no TOML.
void visit_toml_file(const std::string& path, std::string_view where,
                     const std::function<void(const TomlEntry&)>& visit);

/// The number that `text` is where a file has a value: 1_000, +5 and 0xFF too. None: it is none.
std::optional<TomlEntry> toml_number(std::string_view text);

}  // namespace tessera::tools

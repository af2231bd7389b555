// Parsing and printing JSON, compiled once: they are templates, which every source that uses them
// would compile again.
#pragma once

#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace nlohmann {

/// What GoogleTest calls to print a value: its text, in one line.
void PrintTo(const json& value, std::ostream* out);
void PrintTo(const ordered_json& value, std::ostream* out);

}  // namespace nlohmann

namespace tessera::testing {

/// The value of `text`. Throws nlohmann::json::parse_error for what is not JSON.
nlohmann::json parse_json(std::string_view text);
/// With the keys of each object in the order of `text`.
nlohmann::ordered_json parse_ordered_json(std::string_view text);
/// Whether parse_json() would not throw.
bool is_json(std::string_view text);

/// Without spaces and ends of lines. Throws nlohmann::json::type_error for strings not in UTF-8.
std::string json_text(const nlohmann::json& value);
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace tessera::testing

// JSON from files that are not trusted, and JSON literals for what we write.
#pragma once

#include <concepts>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::engine {

/// Parses `text`. Throws IoError naming `path` and the place: malformed, not strict UTF-8, a key
/// twice in one object, nested deeper than 16 levels.
nlohmann::json parse_json(std::string_view text, std::string_view path);

/// Empties a value at the end of its scope: the destructor of one that holds others needs memory,
/// and ends the process when there is none.
class JsonEnd {
 public:
  explicit JsonEnd(nlohmann::json& value) : value_(value) {}
  ~JsonEnd();
  JsonEnd(const JsonEnd&) = delete;
  JsonEnd& operator=(const JsonEnd&) = delete;

 private:
  nlohmann::json& value_;
};

/// JSON literals, which TOML reads as the same values. Numbers have the fewest digits that read
/// back as the same value; NaN and infinities, which JSON cannot express, become null. Bytes that
/// are not UTF-8 become U+FFFD.
std::string json_literal(std::string_view value);
std::string json_literal(double value);
std::string json_literal(float value);
template <std::integral T>
std::string json_literal(T value) {
  if constexpr (std::same_as<T, bool>) return value ? "true" : "false";
  return std::to_string(value);
}

}  // namespace tessera::engine

#include "engine/io/json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::engine {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;

template <class T>
std::string number_literal(T value) {
  if (!std::isfinite(value)) return "null";
  std::string text = fmt::format("{}", value);
  // A whole number stays a floating-point number to whoever reads it.
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace

json parse_json(std::string_view text, std::string_view path) {
  std::vector<std::set<std::string>> keys;  // of each open object
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    // What opens counts as a level too: it may be empty.
    const bool opens =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    require<IoError>(depth + opens <= kMaxDepth, "[json] expected at most {} levels, got more ({})",
                     kMaxDepth, path);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      require<IoError>(keys.back().insert(key).second,
                       "[json] expected each key once, got \"{}\" twice ({})", excerpt(key), path);
    }
    return true;
  };
  // The parser takes a NUL for the end of the text.
  require<IoError>(text.find('\0') == std::string_view::npos,
                   "[json] expected text without NUL bytes, got one ({})", path);
  try {
    return json::parse(text, check);
  } catch (const json::exception& error) {
    fail<IoError>("[json] expected JSON, got {} ({})", excerpt(error.what(), 400), path);
  }
}

std::string json_literal(std::string_view value) {
  std::string literal = json(value).dump(-1, ' ', false, json::error_handler_t::replace);
  // JSON takes a DEL as it is, TOML does not. It is never part of another character.
  for (std::size_t at = 0; (at = literal.find('\x7F', at)) != std::string::npos;) {
    literal.replace(at, 1, "\\u007f");
  }
  return literal;
}
std::string json_literal(double value) { return number_literal(value); }
std::string json_literal(float value) { return number_literal(value); }

}  // namespace tessera::engine

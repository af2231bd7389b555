#include "engine/io/json.h"

#include <cmath>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::engine {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;

// From the leaves on: a value that holds others allocates when it is destroyed, and an empty one
// does not.
void dismantle(json& value) noexcept {
  if (!value.is_structured()) return;
  for (json& child : value) dismantle(child);
  value.clear();
}

// Makes a value of what the parser finds. What throws leaves the part that was made.
class Builder {
 public:
  Builder(json& root, std::string_view path) : root_(root), path_(path) {}

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(json::number_integer_t value) { return add(value); }
  bool number_unsigned(json::number_unsigned_t value) { return add(value); }
  bool number_float(json::number_float_t value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(json::binary_t&) { return false; }  // not in text
  bool start_object(std::size_t) { return open(json::value_t::object); }
  bool start_array(std::size_t) { return open(json::value_t::array); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& key) {
    const auto [member, is_new] = opened_.back()->get_ref<json::object_t&>().try_emplace(key);
    require<IoError>(is_new, "[json] expected each key once, got \"{}\" twice ({})", excerpt(key),
                     path_);
    member_ = &member->second;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& error) {
    std::string_view what = error.what();  // after the parser's own name for it, in brackets
    if (const std::size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    fail<IoError>("[json] expected JSON, got {} ({})", excerpt(what, 400), path_);
  }

 private:
  bool add(json value) {
    place(std::move(value));
    return true;
  }
  json* place(json value) {
    json* const place = opened_.empty()               ? &root_
                        : opened_.back()->is_object() ? member_
                                                      : &opened_.back()->emplace_back();
    *place = std::move(value);
    return place;
  }
  bool open(json::value_t type) {
    // What opens counts as a level too: it may be empty.
    require<IoError>(std::ssize(opened_) < kMaxDepth,
                     "[json] expected at most {} levels, got more ({})", kMaxDepth, path_);
    opened_.push_back(place(type));
    return true;
  }
  bool close() {
    opened_.pop_back();
    return true;
  }

  json& root_;
  std::string_view path_;
  std::vector<json*> opened_;  // each in the one before it
  json* member_ = nullptr;     // of the object that is open, whose value comes next
};

template <class T>
std::string number_literal(T value) {
  if (!std::isfinite(value)) return "null";
  std::string text = fmt::format("{}", value);
  // A whole number stays a floating-point number to whoever reads it.
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace

json parse_json(std::string_view text, std::string_view path) {
  // The parser takes a NUL for the end of the text.
  require<IoError>(text.find('\0') == std::string_view::npos,
                   "[json] expected text without NUL bytes, got one ({})", path);
  json value;
  JsonEnd end(value);
  Builder builder(value, path);
  json::sax_parse(text, &builder);
  return std::exchange(value, nullptr);
}

JsonEnd::~JsonEnd() { dismantle(value_); }

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

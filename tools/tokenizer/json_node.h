// A value of a JSON file that is not trusted, with its place for errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// The most steps of a normalizer, a pre-tokenizer or a decoder. Known models have a handful;
/// each runs within the one before, or over a whole text.
inline constexpr std::size_t kMaxTokenizerSteps = 64;

/// Every check throws IoError: "[tokenizer] expected X, got Y (file: key)". Refers to a value that
/// outlives it.
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  /// "tokenizer.json: model.vocab", as errors end.
  std::string place() const;
  const nlohmann::json& value() const { return *value_; }

  /// Whether an object has `key`, and not as null.
  bool has(const char* key) const;
  /// The value of a key that must be there.
  JsonNode at(const char* key) const;
  /// The values of a list.
  std::vector<JsonNode> items() const;

  const std::string& text(const char* key) const;
  const std::string& text() const;
  bool boolean(const char* key, bool unless_there) const;
  /// In [0, max].
  std::int64_t integer(const char* key, std::int64_t max) const;
  /// The text of a key that must be one character.
  char32_t character(const char* key) const;
  /// What an object calls its kind.
  const std::string& type() const { return text("type"); }

  void require_object() const;
  /// An object, with no keys but these and "type", unless they are null.
  void require_keys(std::initializer_list<std::string_view> known) const;
  /// Throws unless `ok`: expected the value to be `what`, got it as it is.
  void require(bool ok, std::string_view what) const;
  /// One step more than `num_before`, of kMaxTokenizerSteps.
  void require_step(std::size_t num_before) const;
  /// Throws that the value of `key` is not known.
  [[noreturn]] void refuse(const char* key, std::string_view known) const;

 private:
  JsonNode(const nlohmann::json& value, std::string path, std::string key)
      : value_(&value), path_(std::move(path)), key_(std::move(key)) {}
  std::string key_of(std::string_view key) const;

  const nlohmann::json* value_;
  std::string path_, key_;
};

}  // namespace tessera::tools

#include "tools/tokenizer/json_node.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {

using engine::fail;
using engine::IoError;
using nlohmann::json;

namespace {

// Of a value that may be as long as the file.
std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  return engine::excerpt(value.dump());
}

}  // namespace

std::string JsonNode::place() const { return key_.empty() ? path_ : path_ + ": " + key_; }

std::string JsonNode::key_of(std::string_view key) const {
  return key_.empty() ? engine::excerpt(key) : key_ + "." + engine::excerpt(key);
}

bool JsonNode::has(const char* key) const {
  require_object();
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonNode JsonNode::at(const char* key) const {
  require_object();
  const auto found = value_->find(key);
  engine::require<IoError>(found != value_->end(), "[tokenizer] expected key {}, got none ({})",
                           key, place());
  return {*found, path_, key_of(key)};
}

std::vector<JsonNode> JsonNode::items() const {
  require(value_->is_array(), "a list");
  std::vector<JsonNode> items;
  items.reserve(value_->size());
  for (std::size_t i = 0; i < value_->size(); ++i) {
    items.push_back(JsonNode((*value_)[i], path_, key_ + "[" + std::to_string(i) + "]"));
  }
  return items;
}

const std::string& JsonNode::text() const {
  require(value_->is_string(), "text");
  return value_->get_ref<const std::string&>();
}
const std::string& JsonNode::text(const char* key) const { return at(key).text(); }

bool JsonNode::boolean(const char* key, bool unless_there) const {
  if (!has(key)) return unless_there;
  const JsonNode node = at(key);
  node.require(node.value().is_boolean(), "true or false");
  return node.value().get<bool>();
}

std::int64_t JsonNode::integer(const char* key, std::int64_t max) const {
  const JsonNode node = at(key);
  node.require(node.value().is_number_unsigned() &&
                   node.value().get<std::uint64_t>() <= static_cast<std::uint64_t>(max),
               fmt::format("a number in [0, {}]", max));
  return node.value().get<std::int64_t>();
}

char32_t JsonNode::character(const char* key) const {
  const JsonNode node = at(key);
  const std::string& text = node.text();
  std::size_t at = 0;
  const char32_t character = text.empty() ? 0 : next_character(text, at);
  node.require(!text.empty() && at == text.size(), "one character");
  return character;
}

void JsonNode::require_object() const { require(value_->is_object(), "an object"); }

void JsonNode::require_keys(std::initializer_list<std::string_view> known) const {
  require_object();
  for (const auto& [key, value] : value_->items()) {
    engine::require<IoError>(key == "type" || value.is_null() || std::ranges::count(known, key) > 0,
                             "[tokenizer] expected no key that is not known here, got {} ({})",
                             shown(value), path_ + ": " + key_of(key));
  }
}

void JsonNode::require(bool ok, std::string_view what) const {
  if (!ok) {
    fail<IoError>("[tokenizer] expected {}, got {} ({})", what, shown(*value_), place());
  }
}

void JsonNode::require_step(std::size_t num_before) const {
  require(num_before < kMaxTokenizerSteps, fmt::format("at most {} steps", kMaxTokenizerSteps));
}

void JsonNode::refuse(const char* key, std::string_view known) const {
  const JsonNode node = at(key);
  fail<IoError>("[tokenizer] expected {}, got {} ({})", known, shown(node.value()), node.place());
}

}  // namespace tessera::tools

#include "tools/tokenizer/vocabulary.h"

#include <cstddef>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

using engine::excerpt;
using engine::fail;
using engine::IoError;
using engine::require;

Vocabulary::Vocabulary(const JsonNode& node) {
  node.require_object();
  ids_.reserve(node.value().size());
  for (const auto& [text, id] : node.value().items()) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxId)) {
      fail<IoError>("[tokenizer] expected an id in [0, {}], got {} of {} ({})", kMaxId,
                    excerpt(id.dump()), excerpt(text), node.place());
    }
    ids_.emplace(text, id.get<std::int32_t>());
  }
}

std::optional<std::int32_t> Vocabulary::find(std::string_view text) const {
  const auto found = ids_.find(text);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

Merge Vocabulary::merge(std::string_view left, std::string_view right, const JsonNode& node) const {
  const auto id_of = [&](std::string_view text, const char* what) {
    const std::optional<std::int32_t> id = text.empty() ? std::nullopt : find(text);
    if (!id) {
      fail<IoError>("[tokenizer] expected {} to be a token of the vocabulary, got '{}' ({})", what,
                    excerpt(text), node.place());
    }
    return *id;
  };
  Merge merge;
  merge.left = id_of(left, "the first part of a merge");
  merge.right = id_of(right, "the second part of a merge");
  merge.result = id_of(std::string(left) + std::string(right), "what a merge makes");
  return merge;
}

void Vocabulary::add(const std::string& text, std::int32_t id, const JsonNode& node) {
  const auto [place, is_new] = ids_.emplace(text, id);
  require<IoError>(is_new || place->second == id,
                   "[tokenizer] expected {} to have the id {} of the vocabulary, got {} ({})",
                   excerpt(text), place->second, id, node.place());
}

std::vector<std::string> Vocabulary::by_id(const std::string& path) const {
  std::vector<std::string> tokens(ids_.size());
  std::vector<bool> is_taken(ids_.size());
  for (const auto& [text, id] : ids_) {
    const auto at = static_cast<std::size_t>(id);
    if (at >= tokens.size()) {
      fail<IoError>("[tokenizer] expected ids below the {} tokens, got {} of {} ({})",
                    tokens.size(), id, excerpt(text), path);
    }
    if (is_taken[at]) {
      fail<IoError>("[tokenizer] expected each id once, got {} of {} and of {} ({})", id,
                    excerpt(tokens[at]), excerpt(text), path);
    }
    is_taken[at] = true;
    tokens[at] = text;
  }
  return tokens;
}

}  // namespace tessera::tools

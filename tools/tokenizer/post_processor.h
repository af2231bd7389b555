// What is put around the tokens of a text, such as a first and a last one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tools/tokenizer/json_node.h"

namespace tessera::tools {

/// The post-processor of a tokenizer.json.
class PostProcessor {
 public:
  PostProcessor() = default;
  /// Of `node`: null, or one of TemplateProcessing, ByteLevel, which says nothing of ids, or a
  /// Sequence of those. Throws IoError naming file and key for all others, and for an id that is
  /// not below `vocab_size`.
  PostProcessor(const JsonNode& node, std::int64_t vocab_size);
  /// One token before a text and one after it, or none.
  PostProcessor(std::optional<std::int32_t> before, std::optional<std::int32_t> after) {
    if (before) before_ = {*before};
    if (after) after_ = {*after};
  }

  std::span<const std::int32_t> before() const { return before_; }
  std::span<const std::int32_t> after() const { return after_; }

 private:
  void read(const JsonNode& node, std::int64_t vocab_size);
  void read_template(const JsonNode& node, std::int64_t vocab_size);

  std::vector<std::int32_t> before_, after_;
};

}  // namespace tessera::tools

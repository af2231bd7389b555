// The tokens of a file and their ids, checked as they are read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tokenizer/bpe.h"
#include "tools/tokenizer/json_node.h"
#include "tools/tokenizer/merge_table.h"

namespace tessera::tools {

class Vocabulary {
 public:
  static constexpr std::int64_t kMaxId = (std::int64_t{1} << 31) - 2;

  /// Of an object of texts and ids. Throws IoError naming file and key for what is no id.
  explicit Vocabulary(const JsonNode& node);

  std::optional<std::int32_t> find(std::string_view text) const;
  const TokenIds& ids() const { return ids_; }

  /// The merge of two tokens. Throws IoError, naming the place of `node`, when one of them, or both
  /// in a row, is no token, or when one is empty.
  Merge merge(std::string_view left, std::string_view right, const JsonNode& node) const;

  /// A further token, which may be there already. Throws IoError naming the place of `node` when it
  /// is there under another id.
  void add(const std::string& text, std::int32_t id, const JsonNode& node);

  /// All tokens. Throws IoError naming `path` unless their ids are 0, 1, 2 and so on, each once.
  std::vector<std::string> by_id(const std::string& path) const;

 private:
  TokenIds ids_;
};

}  // namespace tessera::tools

// Token files that trainers read (token_file.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/data/token_file.h"

namespace tessera::tools {

/// Collects tokens, of 16 bits where the vocabulary allows, otherwise of 32, and writes them all at
/// the end: llm.c's header says how many there are. Or a file of documents, which are of 32 bits.
class TokenWriter {
 public:
  /// Of tokens below `vocab_size`.
  explicit TokenWriter(std::int64_t vocab_size, bool keeps_documents = false)
      : keeps_documents_(keeps_documents), is_short_(vocab_size <= 1 << 16 && !keeps_documents) {}

  int num_bits() const { return is_short_ ? 16 : 32; }
  std::int64_t num_tokens() const {
    return is_short_ ? std::ssize(short_) : std::ssize(long_.tokens);
  }

  /// Throws InvalidArgument for a token that does not fit and in a file of documents, IoError for
  /// more than 2^31 - 1 in all, which llm.c's header cannot count.
  void add(std::span<const std::int32_t> tokens);
  /// DocumentTokens::add(). Throws InvalidArgument in another file.
  void add_document(std::span<const std::uint32_t> tokens);
  /// Replaces the file at `path` as a whole, or not at all. Throws IoError.
  void write(const std::string& path) const;

 private:
  bool keeps_documents_, is_short_;
  std::vector<std::uint16_t> short_;
  DocumentTokens long_;  // in files that are none of documents without ends
};

}  // namespace tessera::tools

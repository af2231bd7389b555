// Token files with llm.c's header, which trainers read (tools/data/text_data.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera::tools {

/// Collects tokens, of 16 bits where the vocabulary allows, otherwise of 32, and writes them all at
/// the end: the header says how many there are.
class TokenWriter {
 public:
  /// Of tokens below `vocab_size`.
  explicit TokenWriter(std::int64_t vocab_size) : is_short_(vocab_size <= 1 << 16) {}

  int num_bits() const { return is_short_ ? 16 : 32; }
  std::int64_t num_tokens() const { return is_short_ ? std::ssize(short_) : std::ssize(long_); }

  /// Throws InvalidArgument for a token that does not fit, IoError for more than 2^31 - 1 in all,
  /// which the header cannot count.
  void add(std::span<const std::int32_t> tokens);
  /// Replaces the file at `path` as a whole, or not at all. Throws IoError.
  void write(const std::string& path) const;

 private:
  bool is_short_;
  std::vector<std::uint16_t> short_;
  std::vector<std::uint32_t> long_;
};

}  // namespace tessera::tools

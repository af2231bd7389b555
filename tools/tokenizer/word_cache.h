// What words became, so that a word is encoded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// Grows with the words that it is told, up to kMaxWords; then it forgets all of them.
class WordCache {
 public:
  static constexpr std::size_t kMaxWords = std::size_t{1} << 16;
  static constexpr std::size_t kMaxWordNbytes = 128;

  static std::uint64_t hash_of(std::string_view word) {
    std::uint64_t hash = word.size() * 0x9E3779B97F4A7C15u;
    const auto mix = [&](std::uint64_t part) {
      hash = (hash ^ part) * 0xD6E8FEB86659FD93u;
      hash ^= hash >> 32;
    };
    const char* const data = word.data();
    std::size_t at = 0;
    for (; at + 8 <= word.size(); at += 8) {
      std::uint64_t part = 0;
      std::memcpy(&part, data + at, 8);
      mix(part);
    }
    std::uint64_t rest = 0;
    for (std::size_t i = at; i < word.size(); ++i) {
      rest = rest << 8 | static_cast<unsigned char>(data[i]);
    }
    mix(rest);
    return hash;
  }

  /// The tokens of `word`, whose hash_of() is `hash`; nothing if it is not known.
  std::optional<std::span<const std::int32_t>> find(std::string_view word,
                                                    std::uint64_t hash) const {
    if (slots_.empty()) return std::nullopt;
    const Slot& slot = slots_[place(word, hash)];
    if (slot.nbytes == 0) return std::nullopt;
    return std::span(ids_).subspan(slot.first_id, slot.num_ids);
  }

  /// `word` must not be empty, nor known, nor longer than kMaxWordNbytes.
  void add(std::string_view word, std::uint64_t hash, std::span<const std::int32_t> ids) {
    if (num_words_ == kMaxWords) *this = WordCache();
    if (2 * num_words_ >= slots_.size()) grow();
    slots_[place(word, hash)] = {
        hash, static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(ids_.size()),
        static_cast<std::uint32_t>(word.size()), static_cast<std::uint32_t>(ids.size())};
    text_ += word;
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    ++num_words_;
  }

 private:
  struct Slot {
    std::uint64_t hash = 0;
    std::uint32_t first_byte = 0, first_id = 0;
    std::uint32_t nbytes = 0, num_ids = 0;  // nbytes 0: free
  };

  // Where the word is, or would be. Some slot is free.
  std::size_t place(std::string_view word, std::uint64_t hash) const {
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t at = hash & mask;; at = (at + 1) & mask) {
      const Slot& slot = slots_[at];
      if (slot.nbytes == 0) return at;
      if (slot.hash == hash && slot.nbytes == word.size() &&
          std::memcmp(text_.data() + slot.first_byte, word.data(), word.size()) == 0) {
        return at;
      }
    }
  }
  void grow() {
    const std::vector<Slot> old = std::move(slots_);
    slots_.assign(old.empty() ? 256 : 4 * old.size(), Slot());
    for (const Slot& slot : old) {
      if (slot.nbytes == 0) continue;
      slots_[place({text_.data() + slot.first_byte, slot.nbytes}, slot.hash)] = slot;
    }
  }

  std::vector<Slot> slots_;  // of a power of two
  std::string text_;
  std::vector<std::int32_t> ids_;
  std::size_t num_words_ = 0;
};

}  // namespace tessera::tools

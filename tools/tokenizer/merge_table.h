// The merges of a byte pair encoding: which two tokens become one, and which pair is first.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera::tools {

struct Merge {
  std::int32_t left = 0, right = 0, result = 0;
};

class MergeTable {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  MergeTable() : MergeTable(std::span<const Merge>()) {}
  /// In their order: what stands first is merged first. Of two with the same pair the later one
  /// counts.
  explicit MergeTable(std::span<const Merge> merges)
      : slots_(std::bit_ceil(2 * merges.size() + 2)) {
    results_.reserve(merges.size());
    for (const Merge& merge : merges) {
      Slot& slot = slots_[find(key_of(merge.left, merge.right))];
      slot = {key_of(merge.left, merge.right), static_cast<std::uint32_t>(results_.size())};
      results_.push_back(merge.result);
    }
  }

  /// The place of a pair in the order; kNone for a pair that is not merged.
  std::uint32_t rank(std::int32_t left, std::int32_t right) const {
    return slots_[find(key_of(left, right))].rank;
  }
  std::int32_t result(std::uint32_t rank) const { return results_[rank]; }

 private:
  struct Slot {
    std::uint64_t key = 0;
    std::uint32_t rank = kNone;
  };

  static std::uint64_t key_of(std::int32_t left, std::int32_t right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 |
           static_cast<std::uint32_t>(right);
  }
  // Where `key` is, or would be.
  std::size_t find(std::uint64_t key) const {
    std::uint64_t hash = key * 0x9E3779B97F4A7C15u;
    hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u;
    std::size_t at = (hash ^ hash >> 29) & (slots_.size() - 1);
    while (slots_[at].rank != kNone && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  std::vector<Slot> slots_;  // of a power of two, at least half of them free
  std::vector<std::int32_t> results_;
};

}  // namespace tessera::tools

// A pseudo-random order of 0..n-1 that is computed, not stored.
#pragma once

#include <bit>
#include <cstdint>

#include "engine/philox.h"

namespace tessera::tools {

/// Position `index` of the order that (seed, epoch) picks for n items; 0 <= index < n < 2^62. A
/// bijection on 0..n-1: a Feistel network (Luby and Rackoff, 1988; Philox is the round function)
/// permutes the next power of four, and values beyond n are walked through until one is inside
/// (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): under four steps on average.
inline std::int64_t permuted(std::int64_t index, std::int64_t n, std::uint64_t seed,
                             std::uint64_t epoch) {
  constexpr std::uint64_t kNumRounds = 8;
  const int half = (std::bit_width(static_cast<std::uint64_t>(n - 1)) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half, right = value & mask;
    for (std::uint64_t round = 0; round < kNumRounds; ++round) {
      const std::uint64_t mixed =
          left ^ (engine::philox(seed, round << 32 | right, epoch)[0] & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= static_cast<std::uint64_t>(n));
  return static_cast<std::int64_t>(value);
}

}  // namespace tessera::tools

// Whether a test runs under a sanitizer that takes ten times as long.
#pragma once

#include <algorithm>
#include <cstddef>

#include "engine/sanitizers.h"

namespace tessera::testing {

#if defined(TESSERA_TSAN)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif

#if defined(TESSERA_ASAN)
inline constexpr bool kIsSlow = true;
#else
inline constexpr bool kIsSlow = kUnderTsan;
#endif

/// `count`, or under such a sanitizer at most `few`: for tests that try the same in many ways.
constexpr std::size_t at_most_if_slow(std::size_t few, std::size_t count) {
  return kIsSlow ? std::min(few, count) : count;
}

}  // namespace tessera::testing

// How processes know of each other that they live.
#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::comm::control {

/// How often each says so.
inline constexpr std::chrono::milliseconds kBeatInterval{500};

/// After how long without a word one "does not answer". Several beats, whatever the deadline.
inline std::chrono::milliseconds silence_limit(std::chrono::milliseconds deadline) {
  return std::clamp<std::chrono::milliseconds>(deadline, 4 * kBeatInterval,
                                               std::chrono::seconds(10));
}

}  // namespace tessera::comm::control

// What a run measures its own length with: the steady clock, or what a test hands in.
#pragma once

#include <chrono>
#include <functional>

namespace tessera::tools {

using RunClock = std::function<std::chrono::steady_clock::time_point()>;

}  // namespace tessera::tools

// What every program's main() does: run, and turn an error into a message and an exit code.
#pragma once

#include <functional>

namespace tessera::tools {

/// What is said of std::bad_alloc.
inline constexpr const char* kNoMemory = "[memory] expected memory from the system, got none";

/// Runs `program`; returns 0, or 1 after printing the error to stderr. Never lets one escape.
int run_main(const std::function<void()>& program);

}  // namespace tessera::tools

// What every program's main() does: run, and turn an error into a message and an exit code.
#pragma once

#include <functional>

namespace tessera::tools {

/// What is said of std::bad_alloc.
inline constexpr const char* kNoMemory = "[memory] expected memory from the system, got none";

/// Runs `program`; returns 0, or 1 after printing the error to stderr. Never lets one escape. If
/// the reader of stdout has gone before all was written, that is no error to speak of: returns what
/// a shell says of SIGPIPE.
int run_main(const std::function<void()>& program);

}  // namespace tessera::tools

// What every program's main() does: run, and turn an error into a message and an exit code.
#pragma once

#include <functional>

#include "engine/error.h"

namespace tessera::tools {

/// What is said of std::bad_alloc.
inline constexpr const char* kNoMemory = "[memory] expected memory from the system, got none";

/// A failure by no fault of what the program was told to do, such as a process of it that was
/// killed: another try may go well.
class TryAgain : public engine::CommError {
 public:
  using CommError::CommError;
};
/// What run_main() returns for it: EX_TEMPFAIL of sysexits.h.
inline constexpr int kTryAgain = 75;

/// Runs `program`; returns 0, or 1 after printing the error to stderr, kTryAgain for TryAgain.
/// Never lets one escape. If the reader of stdout has gone before all was written, that is no error
/// to speak of: returns what a shell says of SIGPIPE.
int run_main(const std::function<void()>& program);

}  // namespace tessera::tools

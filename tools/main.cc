#include "tools/main.h"

#include <fmt/core.h>

#include <cstdio>
#include <exception>

namespace tessera::tools {

int run_main(const std::function<void()>& program) {
  try {
    program();
    // A write that failed earlier leaves nothing to flush, but its mark.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      fmt::print(stderr, "error: [stdout] expected to write all output, got an error\n");
      return 1;
    }
    return 0;
  } catch (const std::exception& e) {
    std::fflush(stdout);
    fmt::print(stderr, "error: {}\n", e.what());
  } catch (...) {
    fmt::print(stderr, "error: unknown\n");
  }
  return 1;
}

}  // namespace tessera::tools

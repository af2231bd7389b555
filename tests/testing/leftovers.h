// What a process holds, to be compared before and after something that should leave nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <ostream>
#include <thread>

#include "tests/testing/failing_new.h"

namespace tessera::testing {

struct Holdings {
  std::int64_t num_threads = 0, num_open_files = 0, num_allocations = 0;

  friend bool operator==(const Holdings&, const Holdings&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Holdings& h) {
    return out << h.num_threads << " threads, " << h.num_open_files << " open files, "
               << h.num_allocations << " allocations";
  }
};

inline Holdings holdings() {
  const auto count = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  const std::int64_t num_allocations = num_live_news();
  return {.num_threads = count("/proc/self/task"),
          .num_open_files = count("/proc/self/fd"),
          .num_allocations = num_allocations};
}

/// Now, or once they are `expected`: a thread that was joined may be listed for a moment more.
inline Holdings holdings_settled(const Holdings& expected) {
  for (int i = 0; i < 200 && holdings() != expected; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return holdings();
}

}  // namespace tessera::testing

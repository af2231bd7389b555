// Allocations that fail on demand: operator new of the whole process. A test that links this, or a
// program that preloads it as a shared library (see failing_new.cc).
#pragma once

#include <cstdint>

namespace tessera::testing {

/// Lets `num_good` allocations of any thread succeed, and then the next one fail, or all.
enum class Fails { kOne, kAll };
void fail_new_after(std::int64_t num_good, Fails fails);
/// All succeed again.
void never_fail_new();
/// Allocations since the process began.
std::int64_t num_news();
/// Of these, how many have not been given back.
std::int64_t num_live_news();

/// No memory while it lives.
struct NoMemory {
  NoMemory() { fail_new_after(0, Fails::kAll); }
  ~NoMemory() { never_fail_new(); }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;
};

}  // namespace tessera::testing

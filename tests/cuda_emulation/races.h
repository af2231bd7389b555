// What ThreadSanitizer reports, counted: for tests that provoke races. Include it in one file of a
// program.
#pragma once

#include <atomic>

#if defined(__SANITIZE_THREAD__)
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {
std::atomic<int> num_races{0};
constexpr bool kSeesRaces = true;
}  // namespace
// Called by ThreadSanitizer: races that tests provoke do not fail the program.
extern "C" void __tsan_on_report(void*) { ++num_races; }
extern "C" const char* __tsan_default_options() { return "exitcode=0"; }
// --config=tsan lets the first race end a program, here as if all tests had passed: starts it again
// without.
[[gnu::constructor]] static void go_on_after_races(int, char** argv, char**) {
  const char* const options = std::getenv("TSAN_OPTIONS");
  if (options == nullptr || std::strstr(options, "halt_on_error=1") == nullptr) return;
  unsetenv("TSAN_OPTIONS");
  execv("/proc/self/exe", argv);
}
#else
namespace {
int num_races = 0;
constexpr bool kSeesRaces = false;
}  // namespace
#endif

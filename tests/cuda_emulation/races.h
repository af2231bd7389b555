// What ThreadSanitizer reports, counted: for tests that provoke races. Include it in one file of a
// program.
#pragma once

#include <atomic>

#if defined(__SANITIZE_THREAD__)
namespace {
std::atomic<int> num_races{0};
constexpr bool kSeesRaces = true;
}  // namespace
// Called by ThreadSanitizer: races that tests provoke do not fail the program.
extern "C" void __tsan_on_report(void*) { ++num_races; }
extern "C" const char* __tsan_default_options() { return "exitcode=0"; }
#else
namespace {
int num_races = 0;
constexpr bool kSeesRaces = false;
}  // namespace
#endif

// As a shared library it takes FAIL_NEW_AFTER=N or N+ (all from there on) from the environment, and
// counts from the first call of signal(), with which main() begins: what fails before that fails in
// a library's constructors.
#include "tests/testing/failing_new.h"

#include <dlfcn.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> good = -1;  // -1: no end of them
std::atomic<bool> all = false;
std::atomic<std::int64_t> count = 0;
std::atomic<std::int64_t> live = 0;

bool must_fail() {
  ++count;
  std::int64_t left = good;
  while (left >= 0) {
    const std::int64_t next = left == 0 && all ? 0 : left - 1;
    if (good.compare_exchange_weak(left, next)) return left == 0;
  }
  return false;
}

}  // namespace

namespace tessera::testing {

void fail_new_after(std::int64_t num_good, Fails fails) {
  all = fails == Fails::kAll;
  good = num_good;
}
void never_fail_new() { good = -1; }
std::int64_t num_news() { return count; }
std::int64_t num_live_news() { return live; }

}  // namespace tessera::testing

void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  void* data = must_fail() ? nullptr : std::malloc(nbytes == 0 ? 1 : nbytes);
  if (data != nullptr) ++live;
  return data;
}
void* operator new(std::size_t nbytes) {
  void* data = operator new(nbytes, std::nothrow);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void operator delete(void* data) noexcept {
  if (data != nullptr) --live;
  std::free(data);
}
void operator delete(void* data, std::size_t) noexcept { operator delete(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { operator delete(data); }

#ifdef FAILING_NEW_PRELOADED
extern "C" sighandler_t signal(int number, sighandler_t handler) noexcept {
  static const bool kStarted = [] {
    const char* after = std::getenv("FAIL_NEW_AFTER");
    if (after == nullptr) return false;
    char* end = nullptr;
    const std::int64_t num_good = std::strtoll(after, &end, 10);
    using tessera::testing::Fails;
    tessera::testing::fail_new_after(num_good, *end == '+' ? Fails::kAll : Fails::kOne);
    return true;
  }();
  static_cast<void>(kStarted);
  const auto real =
      reinterpret_cast<sighandler_t (*)(int, sighandler_t)>(dlsym(RTLD_NEXT, "signal"));
  return real(number, handler);
}
#endif

#include "tests/testing/thread_limit.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace {

std::atomic<int> num_left = -1;  // threads that may start; -1: any number

}  // namespace

// The sanitizer's, where it is linked into the program and would be passed over.
extern "C" [[gnu::weak]] int __interceptor_pthread_create(pthread_t*, const pthread_attr_t*,
                                                          void* (*)(void*), void*);

// Stands in for the system's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*fn)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto kReal = __interceptor_pthread_create != nullptr
                                ? &__interceptor_pthread_create
                                : reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
  if (num_left == 0) return EAGAIN;
  if (num_left > 0) --num_left;
  return kReal(thread, attributes, fn, argument);
}

void tessera::testing::allow_threads(int num) { num_left = num; }

// TESSERA_ASAN, TESSERA_TSAN, and with Clang alone TESSERA_UBSAN: what this is compiled with. GCC
// defines macros of its own, Clang has features.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_ASAN 1
#endif
#if __has_feature(undefined_behavior_sanitizer)
#define TESSERA_UBSAN 1
#endif
#if __has_feature(thread_sanitizer)
#define TESSERA_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define TESSERA_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define TESSERA_TSAN 1
#endif

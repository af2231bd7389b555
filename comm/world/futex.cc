#include "comm/world/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera::comm {

bool wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                Clock::time_point deadline) {
  const auto ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
  const timespec until{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  while (word.load(std::memory_order_acquire) == value) {
    if (Clock::now() >= deadline) return false;
    // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, which is Clock. Whatever it
    // returns (changed, woken, interrupted, timed out), the loop looks again.
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, value, &until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
  }
  return true;
}

void wake_all(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tessera::comm

// Sleeping until a word of memory changes, with a deadline on the monotonic clock.
//
// [Note: why a futex] std::atomic::wait has no deadline, and std::condition_variable with a steady
// deadline calls pthread_cond_clockwait, which GCC 12's thread sanitizer does not know and reports
// as a double lock. A futex has both, and a woken rank takes no mutex: N ranks do not queue.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::comm {

using Clock = std::chrono::steady_clock;

/// Returns once `word` is not `value` (true), or at the deadline (false).
bool wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                Clock::time_point deadline = Clock::time_point::max());
/// Wakes all who wait on `word`. Change it first.
void wake_all(const std::atomic<std::uint32_t>& word);

}  // namespace tessera::comm

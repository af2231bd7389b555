// What a process holds after many calls: no more than before. A part of the conformance suite for
// ranks that are processes.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <thread>

#include "tests/comm/process_group_suite.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/sanitizers.h"

namespace tessera::comm {
namespace {

using engine::DType;

std::int64_t resident_nbytes() {
  constexpr std::int64_t kPageNbytes = 4096;
  std::int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * kPageNbytes;
}

TEST_P(ProcessGroupTest, CallsLeaveNothing) {
  run(2, [](ProcessGroup& group) {
    const auto [stream, memory] = place(group.rank());
    const auto make = [&, &memory = memory](std::int64_t numel) {
      return Tensor::zeros(memory, {numel}, DType::kF32, "x");
    };
    // Short ones, and some that do not go along with the fingerprints.
    const Tensor part = make(10), whole = make(20), sum = make(20), large = make(30'000);
    const auto call = [&, &stream = stream](std::size_t times) {
      for (std::size_t i = 0; i < times; i += 5) {
        group.all_gather(part, whole, stream, "gather");
        group.reduce_scatter(whole, part, Accumulate::kNo, stream, "scatter");
        group.all_reduce(whole, sum, Accumulate::kNo, stream, "reduce");
        group.broadcast(i % 100 == 0 ? large : part, static_cast<int>(i % 2), stream, "broadcast");
        stream.synchronize();
        group.barrier("barrier");
      }
    };
    const std::size_t times = testing::at_most_if_slow(500, 2000);
    call(1100);  // until what is kept for later calls is there, and tags have come again
    const testing::Holdings before = testing::holdings();
    const std::int64_t resident_before = resident_nbytes();
    call(times);
    // Threads of the world may be at work just now.
    const auto few = static_cast<std::int64_t>(times / 20);
    const auto has_grown = [&](const testing::Holdings& now) {
      return now.num_allocations > before.num_allocations + few ||
             now.num_threads > before.num_threads || now.num_open_files > before.num_open_files;
    };
    testing::Holdings after = testing::holdings();
    for (int i = 0; i < 100 && has_grown(after); ++i) {
      std::this_thread::sleep_for(milliseconds(10));
      after = testing::holdings();
    }
    EXPECT_FALSE(has_grown(after)) << after << ", before " << before;
    if (!testing::kIsSlow) {
      EXPECT_LE(resident_nbytes(), resident_before + (2 << 20));
    }
  });
}

}  // namespace
}  // namespace tessera::comm

// A system that starts no more threads: an error at once, whichever thread it is, and nobody waits.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/tensor.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/thread_limit.h"

namespace tessera::comm {
namespace {

void work(ProcessGroup& world) {
  const engine::Memory memory;
  const Stream gather = Stream::worker_cpu("gather"), reduce = Stream::worker_cpu("reduce");
  const auto part = world.split(0, 0);
  const Tensor sum = Tensor::from<float>(memory, {3}, std::vector<float>{1, 2, 3}, "sum");
  world.all_reduce(sum, sum, Accumulate::kNo, gather, "sum");
  part->broadcast(Tensor::from<float>(memory, {1}, std::vector<float>{1}, "w"), 0, reduce, "w");
  gather.synchronize();
  reduce.synchronize();
  world.barrier("end");
}

// One that was joined may be listed for a moment more.
std::int64_t num_threads_settled(std::int64_t expected) {
  for (int i = 0; i < 200 && testing::holdings().num_threads != expected; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return testing::holdings().num_threads;
}

TEST(ThreadLimit, WhicheverThreadDoesNotStartAllRanksEndWithAnError) {
  const ThreadsOptions kLong{.deadline = std::chrono::hours(1)};  // waiting for it fails the test
  int num_failed = 0;
  run_ranks(4, kLong, work);
  const std::int64_t before = testing::holdings().num_threads;
  for (int n = 0;; ++n) {
    ASSERT_LT(n, 100);
    testing::allow_threads(n);
    std::string error;
    try {
      run_ranks(4, kLong, work);
    } catch (const engine::Error& e) {
      error = e.what();
    }
    testing::allow_threads(-1);
    EXPECT_EQ(num_threads_settled(before), before);
    if (error.empty()) break;
    ++num_failed;
    EXPECT_NE(error.find("expected to start"), std::string::npos) << n << ": " << error;
  }
  EXPECT_EQ(num_failed, 4 + 2 * 4);  // the ranks, and two streams of each
}

}  // namespace
}  // namespace tessera::comm

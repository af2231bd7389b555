// Ranks of which one finds no memory: all end soon with an error, and nobody waits for the
// deadline.
#include <gtest/gtest.h>

#include <exception>
#include <new>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/tensor.h"
#include "tests/testing/failing_new.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using testing::fail_new_after;
using testing::Fails;
using testing::never_fail_new;
using testing::NoMemory;
using testing::num_news;

const ThreadsOptions kLong{.deadline = std::chrono::hours(1)};  // waiting for it fails the test

void work(ProcessGroup& world) {
  const Memory memory;
  const Stream stream = Stream::worker_cpu("comm");
  const auto part = world.split(world.rank() % 2, 0);
  for (int i = 0; i < 2; ++i) {
    const Tensor sum = Tensor::from<float>(memory, {3}, std::vector<float>{1, 2, 3}, "sum");
    part->all_reduce(sum, sum, Accumulate::kNo, stream, "sum");
    stream.synchronize();
    world.barrier("step");
  }
}

TEST(NoMemory, EveryAllocationOfAWorldMayFail) {
  for (const Fails fails : {Fails::kOne, Fails::kAll}) {
    int num_failed = 0, num_passed = 0;
    for (std::int64_t n = 0; num_passed == 0; ++n) {
      ASSERT_LT(n, 10'000);
      const std::int64_t before = num_news();
      fail_new_after(n, fails);
      try {
        run_ranks(4, kLong, work);
        if (num_news() - before <= n) ++num_passed;  // none was to fail
      } catch (const std::bad_alloc&) {
        ++num_failed;
      } catch (const engine::Error&) {  // of a rank that had memory to say what it missed
        ++num_failed;
      }
      never_fail_new();
    }
    EXPECT_GT(num_failed, 50);
  }
}

TEST(NoMemory, RanksAreToldWithoutAnAllocation) {
  const auto groups = make_threads_world(2, kLong);
  {
    const NoMemory none;
    groups[0]->abort("a reason for which there is no memory");
  }
  EXPECT_THROW(groups[1]->barrier("step"), CommError);
}

TEST(NoMemory, ARankLeavesWithoutAnAllocation) {
  auto groups = make_threads_world(3, kLong);
  std::exception_ptr error;
  std::jthread waiting([&] {
    try {
      groups[1]->barrier("step");
    } catch (...) {
      error = std::current_exception();
    }
  });
  {
    const NoMemory none;
    groups[2].reset();
  }
  groups[0]->abort("the end");  // if it has come too late for that
  waiting.join();
  EXPECT_TRUE(error);
}

}  // namespace
}  // namespace tessera::comm

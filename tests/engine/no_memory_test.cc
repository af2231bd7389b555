// What has to work when the system has no memory left: giving memory back, and waiting for work
// that uses it.
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "engine/memory.h"
#include "engine/stream.h"
#include "tests/testing/failing_new.h"

namespace tessera::engine {
namespace {

using testing::fail_new_after;
using testing::Fails;
using testing::never_fail_new;
using testing::NoMemory;

TEST(NoMemory, BlocksAreGivenBackWithoutAnAllocation) {
  constexpr int kBlocks = 1000;  // as many of one size as a vector grows for several times
  for (const bool cache : {true, false}) {
    Memory memory(MemoryOptions{.cache = cache});
    std::vector<std::byte*> blocks;
    blocks.reserve(kBlocks);
    for (int round = 0; round < 2; ++round) {
      for (int i = 0; i < kBlocks; ++i) {
        blocks.push_back(memory.allocate(256 * (1 + i % 3), Category::kActivation));
      }
      const NoMemory none;
      for (int i = 0; i < kBlocks; ++i) {
        memory.free(blocks[static_cast<std::size_t>(i)], 256 * (1 + i % 3), Category::kActivation);
      }
      blocks.clear();
    }
    EXPECT_EQ(memory.stats().total_nbytes, 0);
    EXPECT_EQ(memory.stats().reserved_nbytes > 0, cache);
  }
}

TEST(NoMemory, BooksThatCannotGrowTakeNoBlock) {
  Memory memory;
  int num_failed = 0;
  for (std::int64_t n = 0; n < 4; ++n) {
    fail_new_after(n, Fails::kOne);
    try {
      memory.free(memory.allocate(512 * (n + 1), Category::kGradient), 512 * (n + 1),
                  Category::kGradient);
    } catch (const std::bad_alloc&) {
      ++num_failed;
    }
    never_fail_new();
  }
  EXPECT_GE(num_failed, 2);
  EXPECT_EQ(memory.stats().total_nbytes, 0);
  memory.free(memory.allocate(512, Category::kGradient), 512, Category::kGradient);
}

TEST(NoMemory, AStreamIsWaitedForWithoutAnAllocation) {
  const Stream stream = Stream::worker_cpu("worker");
  std::atomic<bool> go = false, done = false;
  stream.launch({.name = "wait"}, [&] {
    while (!go) std::this_thread::yield();
  });
  stream.launch({.name = "end"}, [&] { done = true; });
  {
    const NoMemory none;
    go = true;
    stream.synchronize();
  }
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace tessera::engine

// The emulated CUDA runtime's account of waits, their removal, and programs that are steered from
// outside.
#include "tests/cuda_emulation/runtime_testing.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

namespace tessera::cuda_emulation {
namespace {

/// Stream a writes, b reads, a writes again. Returns what b read. `twice`: with a redundant wait in
/// each round.
std::vector<int> exchange(int num_rounds, bool twice) {
  const cudaStream_t a = new_stream();
  const cudaStream_t b = new_stream();
  const cudaEvent_t written = new_event();
  const cudaEvent_t was_read = new_event();
  int* x = new_device<int>(1);
  int* results = new_pinned<int>(static_cast<std::size_t>(num_rounds));
  for (int i = 0; i < num_rounds; ++i) {
    if (i > 0) check(cudaStreamWaitEvent(a, was_read, 0));
    check(launch(a, x, [i](int* storage) { *storage = i; }));
    check(cudaEventRecord(written, a));
    check(cudaStreamWaitEvent(b, written, 0));
    if (twice) check(cudaStreamWaitEvent(b, written, 0));
    check(launch(b, x, [=](int* storage) { results[i] = *storage; }));
    check(cudaEventRecord(was_read, b));
  }
  check(cudaEventSynchronize(was_read));
  std::vector<int> read(results, results + num_rounds);
  check(cudaStreamSynchronize(b));  // redundant
  check(cudaDeviceSynchronize());
  check(cudaFree(x));
  check(cudaFreeHost(results));
  check(cudaEventDestroy(written));
  check(cudaEventDestroy(was_read));
  check(cudaStreamDestroy(a));
  check(cudaStreamDestroy(b));
  return read;
}

TEST_F(CudaEmulation, WaitsAreAccountedFor) {
  label_thread("rank0");
  start_counting();
  exchange(2, /*twice=*/true);
  const std::vector<Wait> all = waits();
  std::vector<std::string> lines;
  for (const Wait& wait : all) {
    lines.push_back(wait.text() + " " + wait.waiter + " for " + wait.recorded +
                    (wait.redundant ? " redundant" : ""));
  }
  EXPECT_EQ(lines, (std::vector<std::string>{
                       "rank0#1/rank0.1@1 rank0.2 for rank0.1",
                       "rank0#2 rank0.2 for rank0.1 redundant",
                       "rank0#3/rank0.2@1 rank0.1 for rank0.2",
                       "rank0#4/rank0.1@2 rank0.2 for rank0.1",
                       "rank0#5 rank0.2 for rank0.1 redundant",
                       "rank0#6/rank0.1@1/rank0.2@1 rank0 for rank0.2",
                       "rank0#7 rank0 for rank0.2 redundant",
                   }));
}

TEST_F(CudaEmulation, RemovalOfANeededWaitIsSeenAndOfARedundantOneIsNot) {
  label_thread("rank0");
  const std::vector<int> expected = {0, 1, 2};
  for (const bool twice : {false, true}) {
    start_counting();
    EXPECT_EQ(exchange(3, twice), expected);
    const std::vector<Wait> all = waits();
    EXPECT_EQ(std::count_if(all.begin(), all.end(), [](const Wait& w) { return w.redundant; }),
              twice ? 4 : 1);
    for (const Wait& wait : all) {
      // The first of a pair is needed only as long as the second, redundant, stays away.
      if (twice && !wait.redundant) continue;
      remove_wait(wait);
      if (wait.redundant) {
        EXPECT_EQ(exchange(3, twice), expected) << wait.text();
      } else {
        expect_race([&] { EXPECT_NE(exchange(3, twice), expected) << wait.text(); });
      }
      EXPECT_EQ(calls().removed_waits, 1) << wait.text();
    }
  }
}

TEST_F(CudaEmulation, WhatTheHostHasWaitedForIsKnownToWhatItLaunches) {
  label_thread("rank0");
  const cudaStream_t a = new_stream();
  const cudaStream_t b = new_stream();
  const cudaEvent_t event = new_event();
  start_counting();
  check(enqueue(a, "work", [] {}));
  check(cudaEventRecord(event, a));
  check(cudaEventSynchronize(event));
  check(cudaStreamWaitEvent(b, event, 0));
  EXPECT_FALSE(waits().at(0).redundant);
  EXPECT_TRUE(waits().at(1).redundant);
  check(cudaEventDestroy(event));
  check(cudaStreamDestroy(a));
  check(cudaStreamDestroy(b));
}

TEST_F(CudaEmulation, RemovalWaitsForAWaiterThatIsLate) {
  label_thread("rank0");
  const cudaEvent_t event = new_event();
  for (const bool by_host : {false, true}) {
    remove_wait("rank0#1/rank0.1@1");
    std::atomic<int> order = 0;
    const cudaStream_t a = new_stream();  // rank0.1
    const cudaStream_t b = new_stream();
    check(enqueue(a, "covered", [&] { order = order * 10 + 1; }));
    check(cudaEventRecord(event, a));
    sleep_ms(15);
    if (by_host) {
      check(cudaEventSynchronize(event));
      order = 2;
    } else {
      check(cudaStreamWaitEvent(b, event, 0));
      sleep_ms(15);
      check(enqueue(b, "waiter", [&] { order = order * 10 + 2; }));
    }
    check(cudaDeviceSynchronize());
    EXPECT_EQ(order, 21);
    check(cudaStreamDestroy(a));
    check(cudaStreamDestroy(b));
  }
  check(cudaEventDestroy(event));
}

TEST_F(CudaEmulation, ThreadsThatRunAtOnceHaveWaitsOfTheirOwn) {
  start_counting();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank] {
      check(cudaSetDevice(rank));
      exchange(2, /*twice=*/true);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const std::vector<Wait> all = waits();
  ASSERT_EQ(all.size(), 28U);
  for (int rank = 0; rank < 4; ++rank) {
    const Wait& wait = all[static_cast<std::size_t>(rank) * 7];
    const std::string name = "device" + std::to_string(rank);
    EXPECT_EQ(wait.text(), name + "#1/" + name + ".1@1");
  }
}

// Programs.

class CudaEmulationProgramDeathTest : public CudaEmulationDeathTest {
 protected:
  void TearDown() override {
    unsetenv("CUDA_EMULATION");
    CudaEmulationDeathTest::TearDown();
  }
  /// The process of the EXPECT_EXIT that follows starts with this.
  static void ask(const std::string& text) {
    setenv("CUDA_EMULATION", text.c_str(), /*overwrite=*/1);
  }
};

TEST_F(CudaEmulationProgramDeathTest, EnvironmentSteersThem) {
  ask("devices=3,seed=5,permutation=7,memory=1000,fail_malloc=1@2,fail_launch=2@1");
  EXPECT_EXIT(
      {
        const Settings asked = settings();
        check(cudaSetDevice(1));
        char* x = new_device<char>(1);
        void* y = nullptr;
        const bool fails = cudaMalloc(&y, 1) == cudaErrorMemoryAllocation;
        check(cudaSetDevice(2));
        const cudaStream_t stream = new_stream();
        check(launch(stream, static_cast<char*>(nullptr), [](char*) {}));
        const bool breaks = cudaStreamSynchronize(stream) == cudaErrorLaunchFailure;
        static_cast<void>(x);
        const bool right = asked.num_devices == 3 && asked.delay_seed == 5 &&
                           asked.permutation_seed == 7 && asked.memory_nbytes == 1000;
        fprintf(stderr, "%s", right && fails && breaks ? "as asked" : "otherwise");
        std::exit(0);
      },
      testing::ExitedWithCode(0), "as asked");
  ask("device=3");
  EXPECT_DEATH(reset(), "cuda_emulation: cannot read device=3");
}

TEST_F(CudaEmulationProgramDeathTest, WaitsGoToAFileAndComeBackToBeRemoved) {
  const std::string file = testing::TempDir() + "/cuda_emulation_waits.txt";
  ask("waits=" + file);
  EXPECT_EXIT(
      {
        label_thread("rank0");
        exchange(1, /*twice=*/true);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
  std::ifstream lines(file);
  const std::string text{std::istreambuf_iterator<char>(lines), {}};
  EXPECT_EQ(text,
            "rank0#1/rank0.1@1\tStreamWaitEvent\trank0.2\trank0.1\t1\tsuperseded\n"
            "rank0#2\tStreamWaitEvent\trank0.2\trank0.1\t1\tredundant\n"
            "rank0#3/rank0.1@1/rank0.2@1\tEventSynchronize\trank0\trank0.2\t1\tneeded\n"
            "rank0#4\tStreamSynchronize\trank0\trank0.2\t1\tredundant\n");
  ask("remove=rank0#2/rank0.1@1");
  EXPECT_EXIT(
      {
        races_expected = true;
        label_thread("rank0");
        const std::vector<int> results = exchange(1, /*twice=*/false);
        fprintf(stderr, "removed %d, read %d", static_cast<int>(calls().removed_waits), results[0]);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "removed 1, read -1");
}

}  // namespace
}  // namespace tessera::cuda_emulation

// What ranks on GPUs do when something breaks. On the emulated devices, which break on demand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/host_gather.h"
#include "comm/nccl.h"
#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/cuda_check.h"
#include "engine/memory.h"
#include "tests/emulator/control.h"
#include "tests/emulator/nccl_control.h"

namespace tessera::comm {
namespace {

using engine::DeviceError;
using engine::DType;
using engine::Memory;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr milliseconds kLong = std::chrono::hours(1);  // a test that waits for it fails

struct Backend {
  std::string name;
  std::function<void(int size, milliseconds deadline, const std::function<void(ProcessGroup&)>&)>
      run;
  bool share_gpu = false;

  int gpu(int rank) const { return share_gpu ? 0 : rank; }
};

class CudaFaultsTest : public ::testing::TestWithParam<Backend> {
 protected:
  CudaFaultsTest() {
    cuda_emulation::reset();
    cuda_emulation::reset_nccl();
    before_ = cuda_emulation::live();
  }
  ~CudaFaultsTest() override {
    cuda_emulation::reset();
    cuda_emulation::reset_nccl();
  }
  // Whatever happened: nothing may be left.
  void TearDown() override {
    EXPECT_EQ(cuda_emulation::live_communicators(), 0);
    const cuda_emulation::Live after = cuda_emulation::live();
    EXPECT_EQ(after.allocations, before_.allocations);
    EXPECT_EQ(after.pinned, before_.pinned);
    EXPECT_EQ(after.streams, before_.streams);
    EXPECT_EQ(after.events, before_.events);
  }

  // Runs `fn(rank's group, its stream and memory)` and gives what each rank ended with.
  std::vector<std::string> run(
      int size, milliseconds deadline,
      const std::function<void(ProcessGroup&, const Stream&, const Memory&)>& fn) {
    std::vector<std::string> messages(static_cast<std::size_t>(size), "no error");
    try {
      GetParam().run(size, deadline, [&](ProcessGroup& world) {
        try {
          const Stream stream = Stream::cuda("comm", GetParam().gpu(world.rank()));
          const Memory memory(stream);
          fn(world, stream, memory);
        } catch (const std::exception& error) {
          messages[static_cast<std::size_t>(world.rank())] = error.what();
          throw;
        }
      });
    } catch (const std::exception& error) {
      cause_ = error.what();
    }
    return messages;
  }

  // A step of a trainer, as far as comm sees it.
  static void step(ProcessGroup& group, const Stream& stream, const Memory& memory, int i) {
    const std::int64_t n = 300;
    const Tensor full = Tensor::zeros(memory, {n * group.size()}, DType::kF32, "full");
    const Tensor part = Tensor::zeros(memory, {n}, DType::kF32, "part");
    group.all_gather(part, full, stream, "gather " + std::to_string(i));
    group.reduce_scatter(full, part, Accumulate::kYes, stream, "scatter " + std::to_string(i));
    group.all_reduce(full, full, Accumulate::kNo, stream, "reduce " + std::to_string(i));
    group.agree(stream);
    stream.synchronize();
    group.check();
  }

  std::string cause_;

 private:
  cuda_emulation::Live before_;
};

// As comm/nccl_test.cc: each rank like a process of its own.
void run_as_processes(int size, milliseconds deadline,
                      const std::function<void(ProcessGroup&)>& fn) {
  const std::string address = "file:" + ::testing::TempDir() + "faults_" + std::to_string(getpid());
  std::exception_ptr first;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        try {
          fn(*join_nccl({.process = r, .num_processes = size, .address = address}, r,
                        {.deadline = deadline}));
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
      });
    }
  }
  if (first) std::rethrow_exception(first);
}

void run_threads(int size, milliseconds deadline, const std::function<void(ProcessGroup&)>& fn) {
  run_ranks(size, {.deadline = deadline}, fn);
}
void run_nccl(int size, milliseconds deadline, const std::function<void(ProcessGroup&)>& fn) {
  run_nccl_ranks(size, {.deadline = deadline}, fn);
}
void run_fast(int size, milliseconds deadline, const std::function<void(ProcessGroup&)>& fn) {
  run_nccl_ranks(size, {.deadline = deadline, .canonical = false}, fn);
}

const Backend kThreads{"threads", run_threads};
const Backend kThreadsOnOneGpu{"threads_on_one_gpu", run_threads, true};
const Backend kNccl{"nccl", run_nccl};
const Backend kNcclFast{"nccl_fast", run_fast};
const Backend kNcclProcesses{"nccl_processes", run_as_processes};

constexpr auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Backends, CudaFaultsTest,
                         ::testing::Values(kThreads, kThreadsOnOneGpu, kNccl, kNcclFast,
                                           kNcclProcesses),
                         kName);
class OneProcessFaultsTest : public CudaFaultsTest {};
INSTANTIATE_TEST_SUITE_P(Backends, OneProcessFaultsTest,
                         ::testing::Values(kThreads, kThreadsOnOneGpu, kNccl, kNcclFast), kName);
class GpuEachFaultsTest : public CudaFaultsTest {};
INSTANTIATE_TEST_SUITE_P(Backends, GpuEachFaultsTest, ::testing::Values(kThreads, kNccl, kNcclFast),
                         kName);
class NcclFaultsTest : public CudaFaultsTest {};
INSTANTIATE_TEST_SUITE_P(Backends, NcclFaultsTest,
                         ::testing::Values(kNccl, kNcclFast, kNcclProcesses), kName);

TEST_P(CudaFaultsTest, AnOrderlyWorldLeavesNothing) {
  const auto messages =
      run(3, kLong, [](ProcessGroup& world, const auto& stream, const auto& memory) {
        const auto part = world.split(world.rank() / 2, 0);
        for (int i = 0; i < 3; ++i) {
          step(world, stream, memory, i);
          step(*part, stream, memory, i);
        }
      });
  EXPECT_THAT(messages, Each("no error"));
  EXPECT_EQ(cuda_emulation::aborted_communicators(), 0);
}

TEST_P(OneProcessFaultsTest, ARankThatThrowsEndsAll) {
  const auto messages =
      run(3, kLong, [](ProcessGroup& world, const auto& stream, const auto& memory) {
        for (int i = 0;; ++i) {
          if (i == 2 && world.rank() == 1) throw std::runtime_error("no more data");
          step(world, stream, memory, i);
        }
      });
  EXPECT_THAT(messages, Each(HasSubstr("no more data")));
  EXPECT_EQ(cause_, "no more data");
}

TEST_P(GpuEachFaultsTest, AFailedLaunchOnOneGpuEndsAllAndIsNamed) {
  for (const int nth : {1, 2, 7}) {
    cuda_emulation::fail_launch(1, nth);
    const auto messages =
        run(3, kLong, [](ProcessGroup& world, const auto& stream, const auto& memory) {
          for (int i = 0;; ++i) step(world, stream, memory, i);
        });
    EXPECT_THAT((std::vector<std::string>{messages[0], messages[2]}), Each(HasSubstr("rank 1")));
    EXPECT_THAT(messages[1],
                AnyOf(HasSubstr("unspecified launch failure"), HasSubstr("unhandled cuda error")));
    EXPECT_EQ(cause_, messages[1]);
    cuda_emulation::reset();
  }
}

TEST_P(GpuEachFaultsTest, OutOfMemoryOnOneGpuEndsAllAndIsNamed) {
  // A tensor of the user, and where there is some, what NCCL is staged in.
  for (const int nth : {1, GetParam().name == "threads" ? 2 : 3}) {
    cuda_emulation::fail_malloc(1, nth, 2);  // the second try, too
    const auto messages =
        run(3, kLong, [](ProcessGroup& world, const auto& stream, const auto& memory) {
          for (int i = 0; i < 100; ++i) step(world, stream, memory, i);
        });
    EXPECT_THAT(messages[1], HasSubstr("[memory] expected"));
    EXPECT_THAT(messages, Each(HasSubstr("on cuda:1")));
    cuda_emulation::reset();
  }
}

TEST_P(NcclFaultsTest, AnAsynchronousErrorEndsAllAndIsNamed) {
  for (const int nth : {1, 2, 8}) {
    cuda_emulation::fail_nccl(1, nth, ncclRemoteError);
    const auto messages =
        run(4, kLong, [](ProcessGroup& world, const auto& stream, const auto& memory) {
          for (int i = 0;; ++i) step(world, stream, memory, i);
        });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("rank 1"), HasSubstr("remote process exited"))));
    EXPECT_GT(cuda_emulation::aborted_communicators(), 0);
  }
}

TEST_P(NcclFaultsTest, ARankThatStopsInsideEndsByTheDeadline) {
  cuda_emulation::silence_nccl(2, 3);
  const auto messages =
      run(3, milliseconds(500), [](ProcessGroup& world, const auto& stream, const auto& memory) {
        for (int i = 0;; ++i) step(world, stream, memory, i);
      });
  EXPECT_THAT(messages, Each(HasSubstr("expected 3 ranks within 500 ms")));
  EXPECT_THAT(messages, Each(AnyOf(HasSubstr("scatter 0'"), HasSubstr("reduce 0'"))));
}

TEST_P(OneProcessFaultsTest, ThrowingWithCollectivesOnAStreamEnds) {
  // Each rank unwinds a stream with collectives that the others never join.
  const auto messages =
      run(3, kLong, [](ProcessGroup& world, const auto& stream, const auto& memory) {
        const Tensor t = Tensor::zeros(memory, {100}, DType::kF32, "t");
        for (int i = 0; i < 10 * world.rank(); ++i) world.broadcast(t, 0, stream, "x");
        throw std::runtime_error("no more data");
      });
  EXPECT_THAT(messages, Each(HasSubstr("no more data")));
}

TEST_P(CudaFaultsTest, AnAbortUnblocksStreamsThatHang) {
  std::atomic<int> num_waiting = 0;
  const auto messages =
      run(3, kLong, [&](ProcessGroup& world, const auto& stream, const auto& memory) {
        step(world, stream, memory, 0);
        if (world.rank() == 0) {
          while (num_waiting < 2) std::this_thread::yield();
          std::this_thread::sleep_for(milliseconds(10));
          world.abort("the user gave up");
          world.check();
        }
        ++num_waiting;
        step(world, stream, memory, 1);
      });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("by rank 0"), HasSubstr("the user gave up"))));
}

// The second half of a gather to the host fails on rank 1 while the first is still held up.
TEST_P(GpuEachFaultsTest, AFailedGatherToTheHostLeavesNothingBehind) {
  const auto messages =
      run(3, kLong, [](ProcessGroup& world, const Stream& compute, const Memory& memory) {
        const Stream beside = compute.sibling("values");
        const Tensor values = Tensor::zeros(memory, {1000}, DType::kU8, "values");
        world.barrier("begin");
        if (world.rank() != 1) {
          HostGather(world, values, beside, Memory::pinned(compute), "x").wait<std::uint8_t>();
          world.barrier("never");
        }
        const Memory full(Stream::cuda("full", 7));
        cuda_emulation::fail_malloc(7, 1, 2);
        engine::check_cuda(
            cudaLaunchHostFunc(
                static_cast<cudaStream_t>(beside.native()),
                [](void*) { std::this_thread::sleep_for(milliseconds(20)); }, nullptr),
            "cudaLaunchHostFunc");
        EXPECT_THROW(HostGather(world, values, beside, full, "x"), DeviceError);
        // The memory of what failed, given out again.
        const Tensor again = Tensor::empty(memory, {3000}, DType::kU8, "again");
        memory.fill(again.raw(), 7, again.nbytes());
        compute.synchronize();
        beside.synchronize_quietly();
        EXPECT_EQ(engine::to_vector<std::uint8_t>(again), std::vector<std::uint8_t>(3000, 7));
        world.check();
      });
  EXPECT_THAT(messages, Each(HasSubstr("by rank 1: a rank could not gather its values")));
}

TEST_P(NcclFaultsTest, AnOldLibraryIsRefused) {
  cuda_emulation::set_nccl_version(22105);
  run(1, kLong, [](ProcessGroup&, const auto&, const auto&) {});
  EXPECT_THAT(cause_, HasSubstr("expected NCCL 2.22.0 or newer, got 2.21.5"));
}

TEST(NcclFaultsAloneTest, TwoProcessesOnOneGpuAreRefused) {
  cuda_emulation::reset();
  std::vector<std::string> messages(2);
  std::vector<std::jthread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      try {
        join_nccl(
            {.process = r,
             .num_processes = 2,
             .address = "file:" + ::testing::TempDir() + "one_gpu_" + std::to_string(getpid())},
            0, {.deadline = kLong});
      } catch (const CommError& error) {
        messages[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  threads.clear();
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("invalid usage"), HasSubstr("comm:threads"))));
  EXPECT_EQ(cuda_emulation::live_communicators(), 0);
}

}  // namespace
}  // namespace tessera::comm

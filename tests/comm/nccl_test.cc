// Ranks over NCCL: the conformance suite, and what threads and processes may choose. Needs 8 GPUs,
// or the emulated ones.
#include "comm/nccl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/cuda.h"
#include "tests/comm/known_tensors.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_threads.h"

namespace tessera::comm {
namespace {

using engine::BFloat16;
using engine::DeviceError;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

Stream on_own_gpu(int rank, std::string name, engine::StreamOptions options) {
  return Stream::cuda(std::move(name), rank, options);
}

// Each rank as a process would: nothing but the place where they meet, and NCCL. What real
// processes do is for nccl_processes_test.
void run_as_processes(int size, const NcclOptions& options,
                      const std::function<void(ProcessGroup&)>& fn) {
  const std::string address = "file:" + ::testing::TempDir() + "nccl_" + std::to_string(getpid());
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        try {
          fn(*join_nccl({.process = r, .num_processes = size, .address = address}, r, options));
        } catch (...) {
          errors[static_cast<std::size_t>(r)] = std::current_exception();
        }
      });
    }
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

auto backends() {
  return ::testing::Values(Backend{.name = "nccl",
                                   .run =
                                       [](int size, milliseconds deadline, const RankFunction& fn) {
                                         return said_by_threads(size, fn, [&](const auto& each) {
                                           run_nccl_ranks(size, {.deadline = deadline}, each);
                                         });
                                       },
                                   .here = on_own_gpu,
                                   .beside = on_own_gpu,
                                   .num_large = 5003,
                                   .deadline = milliseconds(300)});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

// The unit roundoff of a dtype.
double roundoff(DType dtype) { return std::ldexp(1.0, dtype == DType::kBF16 ? -8 : -24); }

// |sum - canonical| in units of the stated bound; at most 1.
double distance_in_bounds(const std::vector<float>& sum, const Tensor& canonical, int size,
                          DType dtype, Accumulate accumulate) {
  const std::int64_t numel = canonical.numel();
  std::vector<Tensor> ins;
  for (int r = 0; r < size; ++r) ins.push_back(contribution(Memory(), numel, dtype, r));
  const Tensor start = contribution(Memory(), numel, DType::kF32, 99);
  const bool adds = accumulate == Accumulate::kYes;
  double worst = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    double magnitude = 0;
    for (const Tensor& in : ins) {
      magnitude +=
          std::abs(dtype == DType::kF32 ? at<float>(in, i) : at<BFloat16>(in, i).to_float());
    }
    double bound = 2.0 * (size - 1) * roundoff(dtype) * magnitude;
    if (adds) {
      bound += 2.0 * size * roundoff(DType::kF32) * (std::abs(at<float>(start, i)) + magnitude);
    }
    const double distance = std::abs(double{sum[std::size_t(i)]} - double{at<float>(canonical, i)});
    worst = std::max(worst, bound > 0 ? distance / bound : distance > 0 ? 2.0 : 0.0);
  }
  return worst;
}

TEST(NcclTest, FastSumsLieWithinTheStatedBound) {
  constexpr std::int64_t kPart = 333;
  int num_different = 0;
  for (const int size : {1, 2, 3, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
        const std::int64_t all = kPart * size;
        const Tensor canonical = serial_sum(all, dtype, size, accumulate);
        const Tensor start = contribution(Memory(), all, DType::kF32, 99);
        std::vector<float> scattered(static_cast<std::size_t>(all));
        std::vector<std::vector<float>> wholes(static_cast<std::size_t>(size));
        run_nccl_ranks(size, {.deadline = kLong, .canonical = false}, [&](ProcessGroup& group) {
          EXPECT_FALSE(group.sums_in_rank_order());
          const Place here{on_own_gpu(group.rank(), "comm", {})};
          const Tensor in = contribution(here.memory, all, dtype, group.rank());
          const Tensor part = Tensor::empty(here.memory, {kPart}, DType::kF32, "part");
          const Tensor whole = Tensor::empty(here.memory, {all}, DType::kF32, "whole");
          upload(part, start.slice(group.rank() * kPart, {kPart}));
          upload(whole, start);
          group.reduce_scatter(in, part, accumulate, here.stream, "scatter");
          group.all_reduce(in, whole, accumulate, here.stream, "reduce");
          part.copy_to_host(scattered.data() + group.rank() * kPart);
          auto& out = wholes[static_cast<std::size_t>(group.rank())];
          out.resize(static_cast<std::size_t>(all));
          whole.copy_to_host(out.data());
        });
        EXPECT_LE(distance_in_bounds(scattered, canonical, size, dtype, accumulate), 1.0);
        EXPECT_LE(distance_in_bounds(wholes[0], canonical, size, dtype, accumulate), 1.0);
        for (const auto& whole : wholes) EXPECT_EQ(whole, wholes[0]);
        num_different += std::memcmp(scattered.data(), canonical.raw(), scattered.size() * 4) != 0;
      }
    }
  }
  EXPECT_GT(num_different, 0);  // else the canonical mode would have nothing to show
}

TEST(NcclTest, FastSumsOfBf16AreRoundedToItAndAddedInF32) {
  constexpr std::int64_t kPart = 333;
  constexpr int kSize = 4;
  run_nccl_ranks(kSize, {.deadline = kLong, .canonical = false}, [](ProcessGroup& group) {
    const Place here{on_own_gpu(group.rank(), "comm", {})};
    const Tensor in = contribution(here.memory, kSize * kPart, DType::kBF16, group.rank());
    for (const bool scatters : {true, false}) {
      const std::int64_t n = scatters ? kPart : kSize * kPart;
      const auto reduce = [&](const Tensor& out, Accumulate accumulate) {
        if (scatters) return group.reduce_scatter(in, out, accumulate, here.stream, "scatter");
        group.all_reduce(in, out, accumulate, here.stream, "reduce");
      };
      const Tensor sum = Tensor::empty(here.memory, {n}, DType::kF32, "sum");
      const Tensor total = contribution(here.memory, n, DType::kF32, 99);
      reduce(sum, Accumulate::kNo);
      reduce(total, Accumulate::kYes);
      const Tensor start = contribution(Memory(), n, DType::kF32, 99);
      for (std::int64_t i = 0; i < n; ++i) {
        const float x = at<float>(sum, i);
        ASSERT_EQ(BFloat16::from_float(x).to_float(), x);
        ASSERT_EQ(at<float>(total, i), at<float>(start, i) + x);
      }
    }
  });
}

TEST(NcclTest, FastSumsMayBeInPlace) {
  run_nccl_ranks(2, {.deadline = kLong, .canonical = false}, [](ProcessGroup& group) {
    const Place here{on_own_gpu(group.rank(), "comm", {})};
    const Tensor sum = serial_sum(8, DType::kF32, 2, Accumulate::kNo);  // two terms: any order
    const Tensor whole = contribution(here.memory, 8, DType::kF32, group.rank());
    group.all_reduce(whole, whole, Accumulate::kNo, here.stream, "reduce");
    EXPECT_TRUE(same_bytes(whole, sum));
    const Tensor full = contribution(here.memory, 8, DType::kF32, group.rank());
    const Tensor own = full.slice(4 * group.rank(), {4});
    group.reduce_scatter(full, own, Accumulate::kNo, here.stream, "scatter");
    EXPECT_TRUE(same_bytes(own, sum.slice(4 * group.rank(), {4})));
  });
}

TEST(NcclTest, ThreadRanksNeedAGpuEach) {
  const auto refused = [](int size, NcclOptions options, const std::string& text) {
    try {
      make_nccl_world(size, options);
      ADD_FAILURE() << "expected an error with " << text;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  const int count = engine::cuda::num_devices();
  refused(count + 1, {}, "(several ranks on one GPU run with comm:threads)");
  refused(2, {.gpus = {1, 1}}, "got cuda:1 twice");
  refused(2, {.gpus = {0}}, "expected GPUs of 2 ranks, got 1");
  refused(1, {.gpus = {count}}, "expected a GPU below");
  refused(1, {.gpus = {-1}}, "expected a GPU below");
  refused(0, {}, "at least 1 rank");
  refused(1, {.deadline = milliseconds(0)}, "deadline");
}

TEST(NcclTest, ThreadRanksMayChooseTheirGpus) {
  constexpr std::array kGpus = {3, 1};
  run_nccl_ranks(2, {.deadline = kLong, .gpus = {3, 1}}, [&](ProcessGroup& world) {
    const auto part = world.split(0, -world.rank());
    const Place here{on_own_gpu(kGpus[std::size_t(world.rank())], "comm", {})};
    const Tensor out = Tensor::empty(here.memory, {2}, DType::kI32, "out");
    const std::vector<std::int32_t> value = {world.rank()};
    part->all_gather(Tensor::from<std::int32_t>(here.memory, {1}, value), out, here.stream, "x");
    EXPECT_EQ(at<std::int32_t>(out, 0), 1);
    EXPECT_EQ(at<std::int32_t>(out, 1), 0);
  });
}

TEST(NcclTest, StreamsOfOtherDevicesAreRefused) {
  run_nccl_ranks(2, {.deadline = kLong}, [](ProcessGroup& group) {
    const Place here{on_own_gpu(group.rank(), "comm", {})};
    for (const Stream& other : {Stream::inline_cpu("cpu"), on_own_gpu(2, "other", {})}) {
      const Memory memory(other);
      const Tensor t = Tensor::zeros(memory, {2}, DType::kF32, "t");
      try {
        group.broadcast(t, 0, other, "x");
        ADD_FAILURE() << "expected an error";
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(),
                    HasSubstr("expected a stream of cuda:" + std::to_string(group.rank())));
      }
      EXPECT_THROW(group.broadcast(t, 0, here.stream, "x"), InvalidArgument);
    }
    group.broadcast(Tensor::zeros(here.memory, {2}, DType::kF32), 0, here.stream, "still usable");
  });
}

TEST(NcclTest, AnAbsentLibraryIsNamed) {
  try {
    make_nccl_world(1, {.library_path = "no_such_folder/libnccl.so.2"});
    FAIL() << "expected an error";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("no_such_folder/libnccl.so.2"), HasSubstr("comm:threads")));
  }
}

TEST(NcclTest, StagingIsCountedAndKept) {
  run_nccl_ranks(2, {.deadline = kLong}, [](ProcessGroup& group) {
    const Place here{on_own_gpu(group.rank(), "comm", {})};
    const auto communication = static_cast<std::size_t>(engine::Category::kCommunication);
    const Tensor in = Tensor::zeros(here.memory, {4096}, DType::kF32);
    const Tensor out = Tensor::zeros(here.memory, {2048}, DType::kF32);
    group.reduce_scatter(in, out, Accumulate::kNo, here.stream, "first");
    const engine::MemoryStats after_one = here.memory.stats();
    EXPECT_EQ(after_one.current_nbytes[communication], in.nbytes());
    for (int i = 0; i < 5; ++i) {
      group.reduce_scatter(in, out, Accumulate::kYes, here.stream, "more");
      group.all_reduce(in, in, Accumulate::kNo, here.stream, "more");
    }
    EXPECT_EQ(here.memory.stats().reserved_nbytes, after_one.reserved_nbytes);
  });
}

TEST(NcclProcessTest, CollectivesSplitsAndHostCalls) {
  run_as_processes(4, {.deadline = kLong}, [](ProcessGroup& world) {
    const Place here{on_own_gpu(world.rank(), "comm", {})};
    const auto half = world.split(world.rank() % 2, -world.rank());
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), world.rank() < 2 ? 1 : 0);
    const Tensor in = contribution(here.memory, 100, DType::kBF16, world.rank());
    const Tensor sum = Tensor::empty(here.memory, {100}, DType::kF32, "sum");
    const std::vector<std::int32_t> value = {world.rank()};
    const Tensor own = Tensor::from<std::int32_t>(here.memory, {1}, value);
    const Tensor pair = Tensor::empty(here.memory, {2}, DType::kI32, "pair");
    for (int step = 0; step < 5; ++step) {
      world.all_reduce(in, sum, Accumulate::kNo, here.stream, "reduce");
      half->all_gather(own, pair, here.stream, "gather");
      world.agree(here.stream);
      half->agree(here.stream);
      world.check();
    }
    world.barrier("end");
    half->barrier("end");
    EXPECT_TRUE(same_bytes(sum, serial_sum(100, DType::kBF16, 4, Accumulate::kNo)));
    EXPECT_EQ(at<std::int32_t>(pair, 0), world.rank() % 2 + 2);
    EXPECT_EQ(at<std::int32_t>(pair, 1), world.rank() % 2);
  });
}

// What each rank's CommError says.
std::vector<std::string> process_errors(int size, milliseconds deadline,
                                        const std::function<void(ProcessGroup&)>& fn) {
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  run_as_processes(size, {.deadline = deadline}, [&](ProcessGroup& world) {
    try {
      fn(world);
    } catch (const CommError& error) {
      messages[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  return messages;
}

TEST(NcclProcessTest, RanksThatDeclareOtherThingsAreToldWhenTheyAgree) {
  const auto messages = process_errors(2, kLong, [&](ProcessGroup& world) {
    const Caller c{world, {on_own_gpu(world.rank(), "comm", {})}};
    world.declare("a step");
    world.declare(world.rank() == 0 ? "lr 0.1" : "lr 0.2");
    world.agree(c.place.stream);
    world.barrier("end");
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("expected rank 0's calls up to #1 lr 0.1"),
                                   HasSubstr("got rank 1's up to #1 lr 0.2"))));
}

TEST(NcclProcessTest, RanksThatDifferAreToldBothSides) {
  for (const bool in_barrier : {true, false}) {
    const auto messages = process_errors(3, kLong, [&](ProcessGroup& world) {
      const Caller c{world, {on_own_gpu(world.rank(), "comm", {})}};
      c.gather(4, "h.0");
      // Equal bytes, so that NCCL notices nothing.
      c.gather(4, world.rank() == 2 ? "h.2" : "h.1");
      if (in_barrier) world.barrier("step");
      world.agree(c.place.stream);
      c.wait();
    });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("expected rank 0's calls up to #"),
                                     HasSubstr("got rank 2's up to #"))));
    if (!in_barrier) {
      EXPECT_THAT(messages, Each(AllOf(HasSubstr("[agree #2 of world]"),
                                       HasSubstr("#1 all_gather f32 x 4 'h.1'"),
                                       HasSubstr("#1 all_gather f32 x 4 'h.2'"))));
    }
  }
}

TEST(NcclProcessTest, AMissingRankEndsByTheDeadline) {
  for (const bool in_barrier : {true, false}) {
    const auto messages = process_errors(3, milliseconds(400), [&](ProcessGroup& world) {
      const Caller c{world, {on_own_gpu(world.rank(), "comm", {})}};
      c.gather(4, "h.0");
      if (world.rank() == 1) {
        std::this_thread::sleep_for(milliseconds(800));
        throw CommError("gone");
      }
      if (in_barrier) world.barrier("step");
      c.scatter(4, "h.1");
    });
    EXPECT_THAT(
        (std::vector<std::string>{messages[0], messages[2]}),
        Each(AllOf(HasSubstr(in_barrier ? "barrier 'step'" : "reduce_scatter f32 x 4 'h.1'"),
                   HasSubstr("expected 3 ranks within 400 ms"))));
  }
}

TEST(NcclProcessTest, NonsenseIsRefused) {
  EXPECT_THROW(join_nccl({.process = 2, .num_processes = 2, .address = "file:x"}, 0),
               InvalidArgument);
  EXPECT_THROW(join_nccl({.process = 0, .num_processes = 2, .address = "x"}, 0), InvalidArgument);
  for (const int gpu : {-1, 99}) EXPECT_THROW(join_nccl({}, gpu), InvalidArgument);
  EXPECT_THROW(join_nccl_ranks({}, {}), InvalidArgument);
  EXPECT_THROW(join_nccl_ranks({}, {.gpus = {0, 0}}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::comm

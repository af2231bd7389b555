// The conformance suite of process groups: what every backend promises.
#include "comm/process_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "engine/philox.h"

namespace tessera::comm {
namespace {

using engine::BFloat16;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kSizes[] = {1, 2, 3, 4, 8};
constexpr std::int64_t kNumels[] = {0, 1, 3, 1000, 100003};  // the last is several pieces
constexpr milliseconds kLong = std::chrono::hours(1);        // a test that waits for it fails

// What moves: all dtypes; two odd ones where it takes long.
std::vector<DType> dtypes_for(std::int64_t numel) {
  if (numel > 1000) return {DType::kBF16, DType::kU8};
  return {DType::kF32, DType::kBF16, DType::kI32, DType::kI64, DType::kU8};
}

// How to run ranks on a backend.
struct Backend {
  std::string name;
  std::function<void(int size, milliseconds deadline, const std::function<void(ProcessGroup&)>&)>
      run;
};

class ProcessGroupTest : public ::testing::TestWithParam<Backend> {
 protected:
  static void run(int size, const std::function<void(ProcessGroup&)>& fn,
                  milliseconds deadline = kLong) {
    GetParam().run(size, deadline, fn);
  }

  // What each rank's CommError says; empty where there is none.
  static std::vector<std::string> errors(int size, const std::function<void(ProcessGroup&)>& fn,
                                         milliseconds deadline = kLong) {
    std::vector<std::string> messages(static_cast<std::size_t>(size));
    run(
        size,
        [&](ProcessGroup& group) {
          try {
            fn(group);
          } catch (const CommError& error) {
            messages[static_cast<std::size_t>(group.rank())] = error.what();
          }
        },
        deadline);
    return messages;
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest,
                         ::testing::Values(Backend{
                             "threads",
                             [](int size, milliseconds deadline, const auto& fn) {
                               run_ranks(size, {.deadline = deadline}, fn);
                             }}),
                         [](const auto& info) { return info.param.name; });

// A different byte pattern for every seed.
void fill_bytes(const Tensor& t, std::uint64_t seed) {
  std::uint64_t x = 0x9E3779B97F4A7C15u * (seed + 1);
  for (std::int64_t i = 0; i < t.nbytes(); i += 8) {
    x = (x ^ (x >> 29)) * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(t.raw() + i, &x,
                static_cast<std::size_t>(std::min<std::int64_t>(8, t.nbytes() - i)));
  }
}

Tensor bytes_of(const Memory& memory, std::int64_t numel, DType dtype, std::uint64_t seed) {
  Tensor t = Tensor::empty(memory, {numel}, dtype, "expected");
  fill_bytes(t, seed);
  return t;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.nbytes())) == 0;
}

// Rank `rank`'s contribution number `step`: magnitudes differ so much that sums show their order.
Tensor contribution(const Memory& memory, std::int64_t numel, DType dtype, int rank, int step = 0) {
  const auto stream = static_cast<std::uint64_t>(100 * step + rank);
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = engine::philox(7, i, stream);
    values[i] = std::ldexp(engine::RandomStream::to_uniform(bits[0]) - 0.5f, bits[1] % 12);
  }
  const Tensor t = Tensor::empty(memory, {numel}, dtype, "contribution");
  engine::cast(t, Tensor::from<float>(memory, {numel}, values));
  return t;
}

// The definition: one addition after the other, in the order of the ranks.
Tensor serial_sum(const Memory& memory, std::int64_t numel, DType dtype, int size,
                  Accumulate accumulate) {
  std::vector<Tensor> ins;
  for (int r = 0; r < size; ++r) ins.push_back(contribution(memory, numel, dtype, r));
  const Tensor sum = contribution(memory, numel, DType::kF32, 99);
  for (std::int64_t i = 0; i < numel; ++i) {
    volatile float x = sum.data<float>()[i];
    for (int r = 0; r < size; ++r) {
      const Tensor& in = ins[static_cast<std::size_t>(r)];
      const float term =
          dtype == DType::kF32 ? in.data<float>()[i] : in.data<BFloat16>()[i].to_float();
      x = r == 0 && accumulate == Accumulate::kNo ? term : x + term;
    }
    sum.data<float>()[i] = x;
  }
  return sum;
}

TEST_P(ProcessGroupTest, AllGatherOrdersBlocksByRank) {
  for (const int size : kSizes) {
    run(size, [](ProcessGroup& group) {
      const Memory memory;
      const Stream stream = Stream::inline_cpu("comm");
      for (const std::int64_t n : kNumels) {
        for (const DType dtype : dtypes_for(n)) {
          const Tensor in = bytes_of(memory, n, dtype, std::uint64_t(group.rank()));
          const Tensor out = Tensor::empty(memory, {n * group.size()}, dtype, "out");
          group.all_gather(in, out, stream, "gather");
          for (int r = 0; r < group.size(); ++r) {
            EXPECT_TRUE(
                same_bytes(out.slice(r * n, {n}), bytes_of(memory, n, dtype, std::uint64_t(r))));
          }
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, BroadcastCopiesTheRoot) {
  for (const int size : kSizes) {
    run(size, [](ProcessGroup& group) {
      const Memory memory;
      const Stream stream = Stream::inline_cpu("comm");
      for (const std::int64_t n : kNumels) {
        for (const DType dtype : dtypes_for(n)) {
          for (const int root : {0, group.size() - 1}) {
            const Tensor inout = bytes_of(memory, n, dtype, std::uint64_t(group.rank()));
            group.broadcast(inout, root, stream, "broadcast");
            EXPECT_TRUE(same_bytes(inout, bytes_of(memory, n, dtype, std::uint64_t(root))));
          }
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, AllToAllTransposesBlocks) {
  for (const int size : kSizes) {
    run(size, [](ProcessGroup& group) {
      const Memory memory;
      const Stream stream = Stream::inline_cpu("comm");
      const int size = group.size();
      for (const std::int64_t n : kNumels) {
        for (const DType dtype : dtypes_for(n)) {
          const Tensor in = Tensor::empty(memory, {n * size}, dtype, "in");
          const Tensor out = Tensor::empty(memory, {n * size}, dtype, "out");
          for (int r = 0; r < size; ++r) {
            fill_bytes(in.slice(r * n, {n}), std::uint64_t(100 * group.rank() + r));
          }
          group.all_to_all(in, out, stream, "transpose");
          for (int r = 0; r < size; ++r) {
            const Tensor expected =
                bytes_of(memory, n, dtype, std::uint64_t(100 * r + group.rank()));
            EXPECT_TRUE(same_bytes(out.slice(r * n, {n}), expected));
          }
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, ReductionsAddInRankOrderToTheBit) {
  const Memory memory;
  for (const int size : kSizes) {
    for (const std::int64_t numel : kNumels) {
      const std::int64_t n = numel / size;
      const std::int64_t all = n * size;
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
          const Tensor expected = serial_sum(memory, all, dtype, size, accumulate);
          const Tensor start = contribution(memory, all, DType::kF32, 99);
          run(size, [&](ProcessGroup& group) {
            const Stream stream = Stream::inline_cpu("comm");
            const Tensor in = contribution(memory, all, dtype, group.rank());
            const Tensor part = Tensor::empty(memory, {n}, DType::kF32, "part");
            engine::cast(part, start.slice(group.rank() * n, {n}));
            group.reduce_scatter(in, part, accumulate, stream, "scatter");
            EXPECT_TRUE(same_bytes(part, expected.slice(group.rank() * n, {n})));

            const Tensor whole = Tensor::empty(memory, {all}, DType::kF32, "whole");
            engine::cast(whole, start);
            group.all_reduce(in, whole, accumulate, stream, "reduce");
            EXPECT_TRUE(same_bytes(whole, expected));
          });
        }
      }
    }
  }
}

TEST_P(ProcessGroupTest, SeveralRanksEqualOneThatAccumulates) {
  constexpr int kSteps = 3;
  constexpr std::int64_t kNumel = 4 * 1111;
  for (const int size : {2, 4}) {
    const Memory memory;
    const Tensor one = Tensor::empty(memory, {kNumel}, DType::kF32, "one");
    engine::fill_zero(one);
    run(1, [&](ProcessGroup& group) {
      for (int i = 0; i < kSteps * size; ++i) {
        group.all_reduce(contribution(memory, kNumel, DType::kBF16, i % size, i / size), one,
                         Accumulate::kYes, Stream::inline_cpu("comm"), "micro-batch");
      }
    });
    run(size, [&](ProcessGroup& group) {
      const std::int64_t n = kNumel / size;
      const Tensor shard = Tensor::empty(memory, {n}, DType::kF32, "shard");
      const Tensor whole = Tensor::empty(memory, {kNumel}, DType::kF32, "whole");
      engine::fill_zero(shard);
      engine::fill_zero(whole);
      for (int step = 0; step < kSteps; ++step) {
        const Tensor in = contribution(memory, kNumel, DType::kBF16, group.rank(), step);
        const Stream stream = Stream::inline_cpu("comm");
        group.reduce_scatter(in, shard, Accumulate::kYes, stream, "step");
        group.all_reduce(in, whole, Accumulate::kYes, stream, "step");
      }
      EXPECT_TRUE(same_bytes(shard, one.slice(group.rank() * n, {n})));
      EXPECT_TRUE(same_bytes(whole, one));
    });
  }
}

TEST_P(ProcessGroupTest, BigAndMisalignedTensorsGiveTheSameBits) {
  const std::int64_t n = 200'001;
  const std::int64_t all = 3 * n;
  const Tensor sum = serial_sum(Memory(), all, DType::kF32, 3, Accumulate::kNo);
  run(3, [&](ProcessGroup& group) {
    const Memory memory;
    const Stream stream = Stream::inline_cpu("comm");
    const Tensor in = Tensor::empty(memory, {all + 1}, DType::kF32, "in").slice(1, {all});
    engine::cast(in, contribution(memory, all, DType::kF32, group.rank()));
    const Tensor room = Tensor::empty(memory, {all + 3}, DType::kF32, "out");

    const Tensor whole = room.slice(3, {all});
    group.all_reduce(in, whole, Accumulate::kNo, stream, "reduce");
    EXPECT_TRUE(same_bytes(whole, sum));

    const Tensor part = room.slice(1, {n});
    group.reduce_scatter(in, part, Accumulate::kNo, stream, "scatter");
    EXPECT_TRUE(same_bytes(part, sum.slice(group.rank() * n, {n})));

    const Tensor out = Tensor::empty(memory, {all + 1}, DType::kF32, "out").slice(1, {all});
    group.all_gather(part, out, stream, "gather");
    EXPECT_TRUE(same_bytes(out, sum));
  });
}

TEST_P(ProcessGroupTest, OwnBlocksMayBeInPlace) {
  for (const std::int64_t n : {5, 150'000}) {
    const std::int64_t all = 4 * n;
    const Tensor sum = serial_sum(Memory(), all, DType::kF32, 4, Accumulate::kNo);
    run(4, [&](ProcessGroup& group) {
      const Memory memory;
      const Stream stream = Stream::inline_cpu("comm");
      const Tensor reduced = contribution(memory, all, DType::kF32, group.rank());
      group.all_reduce(reduced, reduced, Accumulate::kNo, stream, "reduce");
      EXPECT_TRUE(same_bytes(reduced, sum));

      const Tensor full = contribution(memory, all, DType::kF32, group.rank());
      const Tensor own = full.slice(group.rank() * n, {n});
      group.reduce_scatter(full, own, Accumulate::kNo, stream, "scatter");
      group.all_gather(own, full, stream, "gather");
      EXPECT_TRUE(same_bytes(full, sum));
    });
  }
}

TEST_P(ProcessGroupTest, ThousandOperationsInFlightOnDelayedStreams) {
  run(3, [](ProcessGroup& group) {
    constexpr int kNum = 1000;
    const Memory memory;
    const Stream stream =
        Stream::worker_cpu("comm", {.delay_seed = std::uint64_t(group.rank()) + 1});
    std::vector<Tensor> sums, outs;
    for (int i = 0; i < kNum; ++i) {
      const Tensor in = contribution(memory, 3, DType::kF32, group.rank(), i);
      sums.push_back(Tensor::empty(memory, {1}, DType::kF32, "sum"));
      outs.push_back(Tensor::empty(memory, {3}, DType::kF32, "out"));
      // Each reads what the one before it wrote. Handles to `in` live in the stream only.
      group.reduce_scatter(in, sums.back(), Accumulate::kNo, stream, std::to_string(i));
      group.all_gather(sums.back(), outs.back(), stream, std::to_string(i));
    }
    stream.synchronize();
    for (int i = 0; i < kNum; ++i) {
      for (std::int64_t j = 0; j < 3; ++j) {
        float expected = contribution(memory, 3, DType::kF32, 0, i).data<float>()[j];
        for (int r = 1; r < 3; ++r)
          expected += contribution(memory, 3, DType::kF32, r, i).data<float>()[j];
        ASSERT_EQ(outs[std::size_t(i)].data<float>()[j], expected);
      }
    }
  });
}

TEST_P(ProcessGroupTest, MemoryMayBeReusedBehindTheEvent) {
  run(4, [](ProcessGroup& group) {
    const Memory memory;
    const Stream stream =
        Stream::worker_cpu("comm", {.delay_seed = std::uint64_t(group.rank()) + 1});
    const Tensor in = Tensor::empty(memory, {50'000}, DType::kI32, "in");
    const Tensor out = Tensor::empty(memory, {200'000}, DType::kI32, "out");
    for (std::uint64_t i = 0; i < 20; ++i) {
      fill_bytes(in, 10 * i + std::uint64_t(group.rank()));
      group.all_gather(in, out, stream, "gather");
      stream.record("gathered").wait();
      fill_bytes(in, 12345);
      const auto r = i % 4;
      ASSERT_TRUE(same_bytes(out.slice(std::int64_t(r) * 50'000, {50'000}),
                             bytes_of(memory, 50'000, DType::kI32, 10 * i + r)));
      engine::fill_zero(out);
    }
  });
}

TEST_P(ProcessGroupTest, StreamsOfOneGroupPairByProgramOrder) {
  run(3, [](ProcessGroup& group) {
    const Memory memory;
    const Stream a = Stream::worker_cpu("a", {.delay_seed = 10u + std::uint64_t(group.rank())});
    const Stream b = Stream::worker_cpu("b", {.delay_seed = 20u + std::uint64_t(group.rank())});
    std::vector<Tensor> outs;
    for (int i = 0; i < 100; ++i) {
      outs.push_back(Tensor::empty(memory, {3}, DType::kI32, "out"));
      const std::vector<std::int32_t> value = {100 * i + group.rank()};
      const Tensor in = Tensor::from<std::int32_t>(memory, {1}, value);
      group.all_gather(in, outs.back(), i % 3 == 0 ? a : b, "same label");
    }
    a.synchronize();
    b.synchronize();
    for (int i = 0; i < 100; ++i) {
      for (int r = 0; r < 3; ++r)
        ASSERT_EQ(outs[std::size_t(i)].data<std::int32_t>()[r], 100 * i + r);
    }
  });
}

TEST_P(ProcessGroupTest, SplitOrdersByKeyThenRank) {
  run(6, [](ProcessGroup& world) {
    // Even and odd ranks; the keys turn the order round and tie 0 with 2, and 1 with 3.
    const auto group = world.split(world.rank() % 2, world.rank() < 4 ? 1 : 0);
    const int ranks[] = {1, 1, 2, 2, 0, 0};
    EXPECT_EQ(group->size(), 3);
    EXPECT_EQ(group->rank(), ranks[world.rank()]);
    const auto single = group->split(-group->rank(), 0);
    EXPECT_EQ(single->size(), 1);
    single->barrier("alone");
  });
}

TEST_P(ProcessGroupTest, GroupsOfAMeshInterleave) {
  run(4, [](ProcessGroup& world) {
    const Memory memory;
    const int row = world.rank() / 2;
    const int column = world.rank() % 2;
    const auto rows = world.split(row, world.rank());
    const auto columns = world.split(column, world.rank());
    const Stream streams[] = {
        Stream::worker_cpu("rows", {.delay_seed = 1u + std::uint64_t(world.rank())}),
        Stream::worker_cpu("columns", {.delay_seed = 9u + std::uint64_t(world.rank())})};
    const std::vector<std::int32_t> value = {world.rank()};
    const Tensor in = Tensor::from<std::int32_t>(memory, {1}, value);
    const Tensor in_row = Tensor::empty(memory, {2}, DType::kI32, "row");
    const Tensor in_column = Tensor::empty(memory, {2}, DType::kI32, "column");
    for (int i = 0; i < 100; ++i) {
      rows->all_gather(in, in_row, streams[0], "row");
      columns->all_gather(in, in_column, streams[1], "column");
      if (i % 10 == 0) world.barrier("all");
    }
    for (const Stream& stream : streams) stream.synchronize();
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(in_row.data<std::int32_t>()[i], 2 * row + i);
      EXPECT_EQ(in_column.data<std::int32_t>()[i], 2 * i + column);
    }
  });
}

// What a rank calls, to be mixed up.
struct Caller {
  ProcessGroup& group;
  Memory memory = Memory();
  Stream stream = Stream::inline_cpu("comm");

  Tensor make(std::int64_t numel, DType dtype = DType::kF32) const {
    const Tensor t = Tensor::empty(memory, {numel}, dtype, "t");
    engine::fill_zero(t);
    return t;
  }
  void gather(std::int64_t n, std::string_view label, DType dtype = DType::kF32) const {
    group.all_gather(make(n, dtype), make(n * group.size(), dtype), stream, label);
  }
  void scatter(std::int64_t n, std::string_view label, DType dtype = DType::kF32,
               Accumulate accumulate = Accumulate::kNo) const {
    group.reduce_scatter(make(n * group.size(), dtype), make(n), accumulate, stream, label);
  }
};

TEST_P(ProcessGroupTest, MismatchNamesBothSidesOnEveryRank) {
  struct Case {
    std::function<void(const Caller&)> most;
    std::function<void(const Caller&)> rank_2;
    std::vector<std::string> expected;
  };
  const Case cases[] = {
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.scatter(8, "h.0"); },
       {"all_gather f32 x 8 'h.0'", "reduce_scatter f32 x 8 'h.0'"}},
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.gather(9, "h.0"); },
       {"all_gather f32 x 8 'h.0'", "all_gather f32 x 9 'h.0'"}},
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.gather(8, "h.0", DType::kI32); },
       {"all_gather f32 x 8", "all_gather i32 x 8"}},
      {[](const Caller& c) { c.scatter(8, "h.0"); },
       [](const Caller& c) { c.scatter(8, "h.0", DType::kBF16); },
       {"reduce_scatter f32 x 8", "reduce_scatter bf16 x 8"}},
      {[](const Caller& c) { c.scatter(8, "h.0"); },
       [](const Caller& c) { c.scatter(8, "h.0", DType::kF32, Accumulate::kYes); },
       {"x 8 'h.0'", "x 8 onto a sum 'h.0'"}},
      {[](const Caller& c) { c.group.broadcast(c.make(4), 0, c.stream, "w"); },
       [](const Caller& c) { c.group.broadcast(c.make(4), 1, c.stream, "w"); },
       {"f32 x 4 from rank 0 'w'", "f32 x 4 from rank 1 'w'"}},
      {[](const Caller& c) { c.gather(0, "h.0"); },
       [](const Caller& c) { c.group.barrier("step"); },
       {"all_gather f32 x 0 'h.0'", "barrier 'step'"}},
      {[](const Caller& c) { c.group.split(0, 0); },
       [](const Caller& c) { c.group.barrier("step"); },
       {"split", "barrier 'step'"}},
      {[](const Caller& c) {
         c.gather(8, "h.0");
         c.gather(8, "h.1");
       },
       [](const Caller& c) {
         c.gather(8, "h.1");
         c.gather(8, "h.0");
       },
       {"all_gather f32 x 8 'h.0'", "all_gather f32 x 8 'h.1'"}},
  };
  for (const Case& c : cases) {
    const auto messages = errors(4, [&](ProcessGroup& group) {
      group.barrier("begin");
      (group.rank() == 2 ? c.rank_2 : c.most)(Caller{group});
    });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("#1 of world] expected rank "),
                                     HasSubstr("got rank "), HasSubstr("rank 2's"),
                                     HasSubstr(c.expected[0]), HasSubstr(c.expected[1]))));
    EXPECT_THAT(messages, Each(messages[0]));
  }
}

TEST_P(ProcessGroupTest, DeadlineNamesWhoIsMissingAndWhatItDidLast) {
  const auto messages = errors(
      3,
      [](ProcessGroup& group) {
        const Caller c{group};
        c.gather(4, "h.0");
        if (group.rank() == 1) {
          // Present, but elsewhere until the others have given up.
          while (true) {
            group.check();
            std::this_thread::sleep_for(milliseconds(1));
          }
        }
        c.scatter(4, "h.1");
      },
      milliseconds(50));
  EXPECT_THAT(messages,
              Each(AllOf(HasSubstr("[reduce_scatter #1 of world]"), HasSubstr("within 50 ms"),
                         HasSubstr("rank 1 is missing, last seen in #0 all_gather f32 x 4 'h.0'"),
                         HasSubstr("reduce_scatter f32 x 4 'h.1'"))));
}

TEST_P(ProcessGroupTest, AbortWakesSleepersAndStays) {
  const auto messages = errors(4, [](ProcessGroup& group) {
    const Caller c{group};
    if (group.rank() == 3) {
      std::this_thread::sleep_for(milliseconds(5));
      group.abort("the loader died");
      group.abort("a later reason");
      EXPECT_THROW(group.check(), CommError);
    }
    try {
      c.gather(4, "h.0");
      FAIL() << "expected an error";
    } catch (const CommError& first) {
      try {
        group.barrier("after");
        FAIL() << "expected an error";
      } catch (const CommError& second) {
        EXPECT_STREQ(first.what(), second.what());
      }
      throw;
    }
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("rank 3"), HasSubstr("the loader died"))));
}

TEST_P(ProcessGroupTest, AbortReachesAllGroupsOfTheWorld) {
  for (const bool by_part : {true, false}) {
    const auto messages = errors(4, [&](ProcessGroup& world) {
      const auto part = world.split(world.rank() / 2, 0);
      if (world.rank() == 3) (by_part ? *part : world).abort("the cause");
      // Rank 2 waits in the part of rank 3, ranks 0 and 1 in the world.
      (world.rank() == 2 ? *part : world).barrier("wait");
    });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("rank 3"), HasSubstr("the cause"))));
  }
}

TEST_P(ProcessGroupTest, AbortReleasesWhatIsPendingOnStreams) {
  const auto messages = errors(3, [](ProcessGroup& group) {
    const Caller c{group, Memory(), Stream::worker_cpu("comm")};
    if (group.rank() == 2) group.abort("the cause");
    for (int i = 0; i < 100; ++i) c.gather(4, "h.0");
    c.stream.synchronize();
  });
  EXPECT_THAT(messages, Each(HasSubstr("the cause")));
}

TEST_P(ProcessGroupTest, BadArgumentsThrowBeforeAnythingIsSent) {
  run(2, [](ProcessGroup& group) {
    const Caller c{group};
    const auto refused = [](const auto& call, std::vector<std::string> parts) {
      try {
        call();
        ADD_FAILURE() << "expected an error with " << parts[0];
      } catch (const InvalidArgument& error) {
        for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
      }
    };
    const std::string rank = "rank " + std::to_string(group.rank());
    const Tensor released = c.make(4);
    released.buffer()->release();
    const Tensor pair = c.make(8);
    const auto no = Accumulate::kNo;
    const auto gather = [&](const Tensor& in, const Tensor& out) {
      return [&, in, out] { group.all_gather(in, out, c.stream, "x"); };
    };
    const auto scatter = [&](const Tensor& in, const Tensor& out, Accumulate accumulate) {
      return [&, in, out, accumulate] { group.reduce_scatter(in, out, accumulate, c.stream, "x"); };
    };
    const auto reduce = [&](const Tensor& in, const Tensor& out, Accumulate accumulate) {
      return [&, in, out, accumulate] { group.all_reduce(in, out, accumulate, c.stream, "x"); };
    };
    const auto transpose = [&](const Tensor& in, const Tensor& out) {
      return [&, in, out] { group.all_to_all(in, out, c.stream, "x"); };
    };
    const auto broadcast = [&](const Tensor& inout, int root) {
      return [&, inout, root] { group.broadcast(inout, root, c.stream, "x"); };
    };
    const Tensor other_half = pair.slice(group.rank() == 0 ? 4 : 0, {4});

    refused(gather(c.make(4), c.make(7)), {"[all_gather] expected 8 elements, got 7", rank});
    refused(gather(c.make(4), c.make(8, DType::kBF16)), {"expected out f32, got bf16", rank});
    refused(gather(Tensor(), c.make(8)), {"undefined", "(in, " + rank});
    refused(gather(released, c.make(8)), {"released"});
    refused(gather(other_half, pair), {"overlap", rank});
    refused(gather(pair.slice(2, {4}), pair), {"overlap"});
    refused(scatter(c.make(7), c.make(4), no), {"[reduce_scatter] expected 8 elements, got 7"});
    refused(scatter(c.make(8, DType::kI32), c.make(4), no), {"expected in f32 or bf16, got i32"});
    refused(scatter(c.make(8), c.make(4, DType::kBF16), no), {"expected out f32, got bf16"});
    refused(scatter(pair, pair.slice(4 * group.rank(), {4}), Accumulate::kYes), {"overlap"});
    refused(scatter(pair, other_half, no), {"overlap"});
    refused(reduce(c.make(4), c.make(5), no), {"[all_reduce] expected 4 elements, got 5"});
    refused(reduce(c.make(4, DType::kU8), c.make(4), no), {"expected in f32 or bf16, got u8"});
    refused(reduce(pair, pair, Accumulate::kYes), {"overlap"});
    refused(reduce(pair.slice(0, {4}), pair.slice(1, {4}), no), {"overlap"});
    refused(transpose(c.make(7), c.make(7)), {"[all_to_all] expected a multiple of 2 elements"});
    refused(transpose(c.make(8), c.make(6)), {"expected 8 elements, got 6"});
    refused(transpose(pair, pair), {"overlap"});
    refused(broadcast(c.make(4), 2), {"[broadcast] expected a root in [0, 2), got 2", rank});
    refused(broadcast(c.make(4), -1), {"got -1"});
    refused(broadcast(released, 0), {"released"});

    // The ranks differ in how much they had refused; the group does not notice.
    if (group.rank() == 0) refused(broadcast(c.make(4), 5), {"got 5"});
    c.gather(4, "still usable");
  });
}

TEST_P(ProcessGroupTest, EveryLaunchStatesItsWork) {
  struct Listener : engine::LaunchListener {
    std::vector<std::string> seen;
    void on_launch(const engine::LaunchRecord& r) noexcept override {
      seen.push_back(std::string(r.work.name) + " " + r.work.detail + " " +
                     std::to_string(r.work.bytes_read) + " " +
                     std::to_string(r.work.bytes_written));
    }
  };
  run(2, [](ProcessGroup& group) {
    Listener listener;
    const Caller c{group, Memory(), Stream::inline_cpu("comm", {.listener = &listener})};
    c.gather(10, "h.0");
    c.scatter(10, "h.1", DType::kBF16);
    EXPECT_EQ(listener.seen,
              (std::vector<std::string>{"all_gather h.0 40 80", "reduce_scatter h.1 40 40"}));
  });
}

}  // namespace
}  // namespace tessera::comm

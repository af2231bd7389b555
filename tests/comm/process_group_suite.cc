// What tensors arrive where, and in which order they are added.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/host_gather.h"
#include "comm/process_group.h"
#include "engine/memory.h"
#include "engine/tensor.h"
#include "tests/comm/known_tensors.h"
#include "tests/comm/process_group_suite.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

TEST_P(ProcessGroupTest, AllGatherOrdersBlocksByRank) {
  for (const int size : GetParam().sizes) {
    run(size, [](ProcessGroup& group) {
      const auto [stream, memory] = place(group.rank());
      for (const std::int64_t n : numels()) {
        for (const DType dtype : dtypes_for(n)) {
          const Tensor in = pattern(memory, n, dtype, std::uint64_t(group.rank()));
          const Tensor out = Tensor::empty(memory, {n * group.size()}, dtype, "out");
          group.all_gather(in, out, stream, "gather");
          for (int r = 0; r < group.size(); ++r) {
            EXPECT_TRUE(is_pattern(out.slice(r * n, {n}), std::uint64_t(r)));
          }
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, BroadcastCopiesTheRoot) {
  for (const int size : GetParam().sizes) {
    run(size, [](ProcessGroup& group) {
      const auto [stream, memory] = place(group.rank());
      for (const std::int64_t n : numels()) {
        for (const DType dtype : dtypes_for(n)) {
          for (const int root : {0, group.size() - 1}) {
            const Tensor inout = pattern(memory, n, dtype, std::uint64_t(group.rank()));
            group.broadcast(inout, root, stream, "broadcast");
            EXPECT_TRUE(is_pattern(inout, std::uint64_t(root)));
          }
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, AllToAllTransposesBlocks) {
  for (const int size : GetParam().sizes) {
    run(size, [](ProcessGroup& group) {
      const auto [stream, memory] = place(group.rank());
      const int size = group.size();
      for (const std::int64_t n : numels()) {
        for (const DType dtype : dtypes_for(n)) {
          const Tensor in = Tensor::empty(memory, {n * size}, dtype, "in");
          const Tensor out = Tensor::empty(memory, {n * size}, dtype, "out");
          for (int r = 0; r < size; ++r) {
            fill_bytes(in.slice(r * n, {n}), std::uint64_t(100 * group.rank() + r));
          }
          group.all_to_all(in, out, stream, "transpose");
          for (int r = 0; r < size; ++r) {
            EXPECT_TRUE(is_pattern(out.slice(r * n, {n}), std::uint64_t(100 * r + group.rank())));
          }
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, ReductionsAddInRankOrderToTheBit) {
  for (const int size : GetParam().sizes) {
    for (const std::int64_t numel : numels()) {
      const std::int64_t n = numel / size;
      const std::int64_t all = n * size;
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
          const Tensor expected = serial_sum(all, dtype, size, accumulate);
          const Tensor start = contribution(Memory(), all, DType::kF32, 99);
          run(size, [&](ProcessGroup& group) {
            ASSERT_TRUE(group.sums_in_rank_order());
            const auto [stream, memory] = place(group.rank());
            const Tensor in = contribution(memory, all, dtype, group.rank());
            const Tensor part = Tensor::empty(memory, {n}, DType::kF32, "part");
            upload(part, start.slice(group.rank() * n, {n}));
            group.reduce_scatter(in, part, accumulate, stream, "scatter");
            EXPECT_TRUE(same_bytes(part, expected.slice(group.rank() * n, {n})));

            const Tensor whole = Tensor::empty(memory, {all}, DType::kF32, "whole");
            upload(whole, start);
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
    const auto said = GetParam().run(1, kLong, [&](ProcessGroup& group) {
      const auto [stream, memory] = place(0);
      const Tensor one = Tensor::zeros(memory, {kNumel}, DType::kF32, "one");
      for (int i = 0; i < kSteps * size; ++i) {
        group.all_reduce(contribution(memory, kNumel, DType::kBF16, i % size, i / size), one,
                         Accumulate::kYes, stream, "micro-batch");
      }
      const std::vector<std::byte> bytes = bytes_of(one);
      return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
    const Tensor expected = Tensor::empty(Memory(), {kNumel}, DType::kF32, "one");
    expected.copy_from_host(said[0].data(), kNumel);
    run(size, [&](ProcessGroup& group) {
      const auto [stream, memory] = place(group.rank());
      const std::int64_t n = kNumel / size;
      const Tensor shard = Tensor::zeros(memory, {n}, DType::kF32, "shard");
      const Tensor whole = Tensor::zeros(memory, {kNumel}, DType::kF32, "whole");
      for (int step = 0; step < kSteps; ++step) {
        const Tensor in = contribution(memory, kNumel, DType::kBF16, group.rank(), step);
        group.reduce_scatter(in, shard, Accumulate::kYes, stream, "step");
        group.all_reduce(in, whole, Accumulate::kYes, stream, "step");
      }
      EXPECT_TRUE(same_bytes(shard, expected.slice(group.rank() * n, {n})));
      EXPECT_TRUE(same_bytes(whole, expected));
    });
  }
}

TEST_P(ProcessGroupTest, BigAndMisalignedTensorsGiveTheSameBits) {
  const std::int64_t n = 2 * GetParam().num_large - 5;
  const std::int64_t all = 3 * n;
  const Tensor sum = serial_sum(all, DType::kF32, 3, Accumulate::kNo);
  run(3, [&](ProcessGroup& group) {
    const auto [stream, memory] = place(group.rank());
    const Tensor in = Tensor::empty(memory, {all + 1}, DType::kF32, "in").slice(1, {all});
    upload(in, contribution(Memory(), all, DType::kF32, group.rank()));
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
  for (const std::int64_t n : {std::int64_t{5}, GetParam().num_large + 1}) {
    const std::int64_t all = 4 * n;
    const Tensor sum = serial_sum(all, DType::kF32, 4, Accumulate::kNo);
    run(4, [&](ProcessGroup& group) {
      const auto [stream, memory] = place(group.rank());
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
    const auto [stream, memory] = delayed_place(group.rank(), std::uint64_t(group.rank()) + 1);
    std::vector<Tensor> ins, sums, outs;
    for (int i = 0; i < kNum; ++i) {
      ins.push_back(contribution(memory, 3, DType::kF32, group.rank(), i));
    }
    for (int i = 0; i < kNum; ++i) {
      const Tensor in = std::exchange(ins[std::size_t(i)], Tensor());
      sums.push_back(Tensor::empty(memory, {1}, DType::kF32, "sum"));
      outs.push_back(Tensor::empty(memory, {3}, DType::kF32, "out"));
      // Each reads what the one before it wrote. Handles to `in` live in the stream only.
      group.reduce_scatter(in, sums.back(), Accumulate::kNo, stream, std::to_string(i));
      group.all_gather(sums.back(), outs.back(), stream, std::to_string(i));
    }
    stream.synchronize();
    for (int i = 0; i < kNum; ++i) {
      for (std::int64_t j = 0; j < 3; ++j) {
        float expected = contribution(Memory(), 3, DType::kF32, 0, i).data<float>()[j];
        for (int r = 1; r < 3; ++r)
          expected += contribution(Memory(), 3, DType::kF32, r, i).data<float>()[j];
        ASSERT_EQ(at<float>(outs[std::size_t(i)], j), expected);
      }
    }
  });
}

TEST_P(ProcessGroupTest, MemoryMayBeReusedAfterTheEvent) {
  run(4, [](ProcessGroup& group) {
    const auto [stream, memory] = delayed_place(group.rank(), std::uint64_t(group.rank()) + 1);
    const std::int64_t n = GetParam().num_large / 2;
    const Tensor in = Tensor::empty(memory, {n}, DType::kI32, "in");
    const Tensor out = Tensor::empty(memory, {4 * n}, DType::kI32, "out");
    for (std::uint64_t i = 0; i < 20; ++i) {
      fill_bytes(in, 10 * i + std::uint64_t(group.rank()));
      group.all_gather(in, out, stream, "gather");
      stream.record("gathered").wait();
      fill_bytes(in, 12345);
      const auto r = i % 4;
      ASSERT_TRUE(is_pattern(out.slice(std::int64_t(r) * n, {n}), 10 * i + r));
      fill_bytes(out, 54321);
    }
  });
}

TEST_P(ProcessGroupTest, StreamsOfOneGroupPairByProgramOrder) {
  run(3, [](ProcessGroup& group) {
    const auto [a, memory] = delayed_place(group.rank(), 10u + std::uint64_t(group.rank()));
    const Stream b =
        GetParam().beside(group.rank(), "b", {.delay_seed = 20u + std::uint64_t(group.rank())});
    std::vector<Tensor> ins, outs;
    for (int i = 0; i < 100; ++i) {
      outs.push_back(Tensor::empty(memory, {3}, DType::kI32, "out"));
      const std::vector<std::int32_t> value = {100 * i + group.rank()};
      ins.push_back(Tensor::from<std::int32_t>(memory, {1}, value));
    }
    b.wait(a.record("written"));
    for (int i = 0; i < 100; ++i) {
      const auto n = std::size_t(i);
      group.all_gather(ins[n], outs[n], i % 3 == 0 ? a : b, "same label");
    }
    a.synchronize();
    b.synchronize();
    for (int i = 0; i < 100; ++i) {
      for (int r = 0; r < 3; ++r) ASSERT_EQ(at<std::int32_t>(outs[std::size_t(i)], r), 100 * i + r);
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

TEST_P(ProcessGroupTest, PartsOfPartsNameRanksOfTheWorld) {
  const auto messages = errors(4, [](ProcessGroup& world) {
    const auto part = world.split(world.rank() / 2, world.rank());
    const auto part_of_part = part->split(0, -world.rank());  // turned round
    EXPECT_EQ(part_of_part->rank(), 1 - world.rank() % 2);
    if (world.rank() == 2) part_of_part->abort("the cause");
    world.barrier("wait");
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("rank 2"), HasSubstr("the cause"))));
}

TEST_P(ProcessGroupTest, GroupsOfAMeshInterleave) {
  run(4, [](ProcessGroup& world) {
    const int row = world.rank() / 2;
    const int column = world.rank() % 2;
    const auto rows = world.split(row, world.rank());
    const auto columns = world.split(column, world.rank());
    const auto [stream, memory] = delayed_place(world.rank(), 1u + std::uint64_t(world.rank()));
    const Stream other = GetParam().beside(world.rank(), "columns",
                                           {.delay_seed = 9u + std::uint64_t(world.rank())});
    const std::vector<std::int32_t> value = {world.rank()};
    const Tensor in = Tensor::from<std::int32_t>(memory, {1}, value);
    const Tensor in_row = Tensor::empty(memory, {2}, DType::kI32, "row");
    const Tensor in_column = Tensor::empty(memory, {2}, DType::kI32, "column");
    other.wait(stream.record("written"));
    for (int i = 0; i < 100; ++i) {
      rows->all_gather(in, in_row, stream, "row");
      columns->all_gather(in, in_column, other, "column");
      if (i % 10 == 0) world.barrier("all");
    }
    stream.synchronize();
    other.synchronize();
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(at<std::int32_t>(in_row, i), 2 * row + i);
      EXPECT_EQ(at<std::int32_t>(in_column, i), 2 * i + column);
    }
  });
}

// As gathers and reductions of a training step: at the same time, but for what waits for the
// other.
TEST_P(ProcessGroupTest, TwoGroupsOfTheSameRanksRunAtOneTime) {
  constexpr int kSize = 4, kNum = 150;
  const auto value = [](int rank, int i, std::int64_t k) {
    return std::int64_t{1000} * rank + 10 * i + k;
  };
  for (const bool world_reduces : {false, true}) {
    run(kSize, [&](ProcessGroup& world) {
      const int rank = world.rank();
      const auto same = world.split(0, rank);
      ProcessGroup& for_gathers = world_reduces ? *same : world;
      ProcessGroup& for_reductions = world_reduces ? world : *same;
      const auto [gathers, memory] = delayed_place(rank, 1u + std::uint64_t(rank));
      const Stream reductions =
          GetParam().beside(rank, "reductions", {.delay_seed = 11u + std::uint64_t(rank)});
      std::vector<Tensor> ins, gathered, reduced;
      for (int i = 0; i < kNum; ++i) {
        std::vector<float> in(2 * kSize);
        for (std::size_t k = 0; k < in.size(); ++k) in[k] = float(value(rank, i, std::int64_t(k)));
        ins.push_back(Tensor::from<float>(memory, {2 * kSize}, in));
        gathered.push_back(Tensor::empty(memory, {2 * kSize * kSize}, DType::kF32, "gathered"));
        reduced.push_back(Tensor::empty(memory, {i % 2 == 0 ? 2 : 2 * kSize}, DType::kF32, "sum"));
      }
      reductions.wait(gathers.record("written"));
      for (int i = 0; i < kNum; ++i) {
        const auto n = std::size_t(i);
        for_gathers.all_gather(ins[n], gathered[n], gathers, "gather");
        if (i % 7 == 0) reductions.wait(gathers.record("gathered"));
        if (i % 2 == 0) {
          for_reductions.reduce_scatter(ins[n], reduced[n], Accumulate::kNo, reductions, "reduce");
        } else {
          for_reductions.all_reduce(ins[n], reduced[n], Accumulate::kNo, reductions, "reduce");
        }
        if (i % 5 == 0) gathers.wait(reductions.record("reduced"));
        if (i % 50 == 0) world.barrier("step");
      }
      gathers.wait(reductions.record("reduced"));
      gathers.synchronize();
      reductions.synchronize();
      for (int i = 0; i < kNum; ++i) {
        const auto n = std::size_t(i);
        for (std::int64_t k = 0; k < 2 * kSize * kSize; ++k) {
          ASSERT_EQ(at<float>(gathered[n], k), value(int(k / (2 * kSize)), i, k % (2 * kSize)));
        }
        for (std::int64_t k = 0; k < reduced[n].numel(); ++k) {
          std::int64_t sum = 0;
          for (int r = 0; r < kSize; ++r) sum += value(r, i, i % 2 == 0 ? 2 * rank + k : k);
          ASSERT_EQ(at<float>(reduced[n], k), sum);
        }
      }
    });
  }
}

TEST_P(ProcessGroupTest, ValuesOfAllRanksReachTheHost) {
  run(3, [](ProcessGroup& group) {
    const Place here = place(group.rank());
    const Stream beside =
        GetParam().beside(group.rank(), "values", {.delay_seed = 1u + std::uint64_t(group.rank())});
    const Memory pinned = Memory::pinned(here.stream);
    const auto exchange = [&]<class T>(T first) {
      const std::vector<T> own = {first, T(group.rank())};
      const Tensor values = Tensor::from<T>(here.memory, {2}, own, "values");
      const HostGather gather(group, values, beside, pinned, "values");
      const std::vector<T> expected = {first, T(0), first, T(1), first, T(2)};
      EXPECT_EQ(gather.wait<T>(), expected);
      EXPECT_EQ(gather.wait<T>(here.stream), expected);
      EXPECT_EQ(gather_to_host<T>(group, own, here.memory, beside, "values"), expected);
      EXPECT_THROW(gather.wait<std::int32_t>(), InvalidArgument);
    };
    for (int i = 0; i < 10; ++i) {
      exchange(0.5f);
      exchange(std::int64_t{1} << 40);
      exchange(std::uint8_t{200});
    }
  });
}

TEST_P(ProcessGroupTest, TextsOfAnyLengthReachTheHost) {
  run(3, [](ProcessGroup& group) {
    const Place here = place(group.rank());
    const Stream beside = GetParam().beside(group.rank(), "texts", {});
    const auto texts = [&](const std::vector<std::string>& of_ranks) {
      const std::string& mine = of_ranks[static_cast<std::size_t>(group.rank())];
      EXPECT_EQ(gather_texts(group, mine, here.memory, beside, "texts"), of_ranks);
    };
    texts({"", "", ""});
    texts({"first", "", "the longest"});
    texts({"", "b", ""});
  });
}

}  // namespace
}  // namespace tessera::comm

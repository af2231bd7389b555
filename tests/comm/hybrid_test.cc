// Ranks as threads of several processes: the conformance suite, with threads that play processes,
// and what only such groups do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "tests/comm/keeping_transport.h"
#include "tests/comm/known_tensors.h"
#include "tests/comm/memory_transport.h"
#include "tests/comm/message_job.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_threads.h"
#include "tests/testing/sanitizers.h"

namespace tessera::comm {
namespace {

using engine::BFloat16;
using engine::DType;
using engine::Memory;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Layout = std::vector<int>;  // ranks of each process

// Processes with `each` ranks; the last one may have fewer.
Layout in_processes_of(int each, int size) {
  Layout layout(std::size_t(size / each), each);
  if (size % each != 0) layout.push_back(size % each);
  return layout;
}

// Two processes, the first of which has more ranks.
Layout in_two_processes(int size) {
  if (size == 1) return {1};
  const int second = std::max(1, size / 3);
  return {size - second, second};
}

Backend backend(std::string name, std::vector<int> sizes,
                const std::function<Layout(int size)>& layout) {
  return {.name = std::move(name),
          .run =
              [layout](int size, milliseconds deadline, const RankFunction& fn) {
                return said_by_threads(size, fn, [&](const auto& each) {
                  MessageJob(layout(size), deadline).run(each);
                });
              },
          .num_large = 70'001,
          .deadline = milliseconds(1000),
          .sizes = std::move(sizes)};
}

auto backends() {
  return ::testing::Values(
      backend("processes_of_two", {2, 3, 4, 8}, [](int size) { return in_processes_of(2, size); }),
      backend("two_processes", {3, 4}, in_two_processes));
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

// What a transport was given to send after the fingerprints.
struct Sent {
  std::atomic<std::int64_t> num_messages = 0, nbytes = 0;
};

class Counts final : public Transport {
 public:
  Counts(std::unique_ptr<Transport> transport, Sent& sent)
      : transport_(std::move(transport)), sent_(sent) {}
  std::string str() const override { return transport_->str(); }
  int process() const override { return transport_->process(); }
  int num_processes() const override { return transport_->num_processes(); }
  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    constexpr std::size_t kFingerprint = 256;
    if (bytes.size() != kFingerprint) {
      ++sent_.num_messages;
      sent_.nbytes += std::ssize(bytes);
    }
    return transport_->send(process, tag, bytes, std::move(owner));
  }
  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    return transport_->receive(process, tag, bytes, std::move(owner));
  }

 private:
  std::unique_ptr<Transport> transport_;
  Sent& sent_;
};

// Processes whose messages are counted.
struct CountedJob {
  explicit CountedJob(const Layout& layout) : sent(layout.size()) {
    auto transports = MemoryTransport::make(static_cast<int>(layout.size()));
    for (std::size_t p = 0; p < layout.size(); ++p) {
      transports[p] = std::make_unique<Counts>(std::move(transports[p]), sent[p]);
    }
    job = std::make_unique<MessageJob>(std::move(transports), layout, kLong);
  }
  std::vector<std::int64_t> nbytes() const {
    std::vector<std::int64_t> nbytes;
    for (const Sent& s : sent) nbytes.push_back(s.nbytes);
    return nbytes;
  }

  std::vector<Sent> sent;
  std::unique_ptr<MessageJob> job;
};

// What rank `rank` brings to a sum, exact in bf16. Magnitudes differ so much that sums show their
// order.
float value(int rank, std::int64_t i) {
  const auto hash = static_cast<std::uint32_t>((i + 1) * 2654435761 + (rank + 1) * 2246822519);
  const std::uint32_t exponent = 117 + (hash >> 8) % 20;
  return std::bit_cast<float>((hash & 0x80000000) | exponent << 23 | (hash & 127) << 16);
}

Tensor values(int rank, std::int64_t numel, DType dtype = DType::kF32) {
  const Tensor t = Tensor::empty(Memory(), {numel}, dtype, "values");
  for (std::int64_t i = 0; i < numel; ++i) {
    const float x = value(rank, i);
    if (dtype == DType::kF32) {
      t.data<float>()[i] = x;
    } else {
      t.data<BFloat16>()[i] = BFloat16::from_float(x);
    }
  }
  return t;
}

Tensor sum_of_values(std::int64_t numel, int size, Accumulate accumulate) {
  const Tensor sum = Tensor::empty(Memory(), {numel}, DType::kF32, "sum");
  for (std::int64_t i = 0; i < numel; ++i) {
    volatile float x = accumulate == Accumulate::kYes ? value(99, i) + value(0, i) : value(0, i);
    for (int r = 1; r < size; ++r) x = x + value(r, i);
    sum.data<float>()[i] = x;
  }
  return sum;
}

// Each collective, small and of many pieces.
void check_collectives(ProcessGroup& group) {
  const Stream stream = Stream::inline_cpu("comm");
  const Memory memory;
  const int rank = group.rank(), size = group.size();
  for (const std::int64_t n : {7, testing::kIsSlow ? 30'001 : 70'001}) {
    const std::int64_t all = n * size;
    const Tensor in = pattern(memory, n, DType::kU8, std::uint64_t(rank));
    const Tensor gathered = Tensor::empty(memory, {all}, DType::kU8, "gathered");
    group.all_gather(in, gathered, stream, "gather");
    const Tensor turned = Tensor::empty(memory, {all}, DType::kU8, "turned");
    group.all_to_all(gathered, turned, stream, "transpose");
    const Tensor told = pattern(memory, n, DType::kU8, std::uint64_t(rank));
    group.broadcast(told, size - 2, stream, "broadcast");
    EXPECT_TRUE(is_pattern(told, std::uint64_t(size - 2)));
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(is_pattern(gathered.slice(r * n, {n}), std::uint64_t(r)));
      EXPECT_TRUE(is_pattern(turned.slice(r * n, {n}), std::uint64_t(rank)));
    }
    for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
      const Tensor expected = sum_of_values(all, size, accumulate);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const Tensor mine = values(rank, all, dtype), whole = values(99, all);
        const Tensor part = values(99, all).slice(rank * n, {n});
        group.reduce_scatter(mine, part, accumulate, stream, "scatter");
        EXPECT_TRUE(same_bytes(part, expected.slice(rank * n, {n})));
        group.all_reduce(mine, whole, accumulate, stream, "reduce");
        EXPECT_TRUE(same_bytes(whole, expected));
        if (dtype != DType::kF32 || accumulate == Accumulate::kYes) continue;
        const Tensor again = values(rank, all);
        group.reduce_scatter(mine, mine.slice(rank * n, {n}), accumulate, stream, "in place");
        EXPECT_TRUE(same_bytes(mine.slice(rank * n, {n}), part));
        group.all_reduce(again, again, accumulate, stream, "in place");
        EXPECT_TRUE(same_bytes(again, expected));
      }
    }
  }
}

TEST(HybridTest, EveryLayoutHasTheBitsOfOneProcess) {
  for (const Layout& layout : {Layout{2, 2}, Layout{3, 3}, Layout{2, 2, 2}, Layout{3, 1, 2}}) {
    MessageJob(layout, kLong).run(check_collectives);
  }
}

// Groups of hsdp: replicas inside processes, shards across them. Each is used on a stream of its
// own, and so at once by all threads.
TEST(HybridTest, ReplicasAndShardsRunAtOneTime) {
  MessageJob({2, 2, 2}, kLong).run([](ProcessGroup& world) {
    const int replica = world.rank() / 2, shard = world.rank() % 2;
    const auto inside = world.split_by([](int r) { return r / 2; });
    const auto across = world.split_by([](int r) { return r % 2; });
    const std::uint64_t seed = std::uint64_t(world.rank());
    const Stream a = Stream::worker_cpu("inside", {.delay_seed = seed + 1});
    const Stream b = Stream::worker_cpu("across", {.delay_seed = seed + 11});
    const Stream c = Stream::worker_cpu("world", {.delay_seed = seed + 21});
    const Memory memory;
    constexpr int kNum = 100;
    std::vector<Tensor> ins, insides, acrosses, worlds;
    for (int i = 0; i < kNum; ++i) {
      const std::vector<std::int32_t> value = {100 * i + world.rank()};
      ins.push_back(Tensor::from<std::int32_t>(memory, {1}, value));
      insides.push_back(Tensor::empty(memory, {2}, DType::kI32, "inside"));
      acrosses.push_back(Tensor::empty(memory, {3}, DType::kI32, "across"));
      worlds.push_back(Tensor::empty(memory, {6}, DType::kI32, "world"));
      const auto n = std::size_t(i);
      inside->all_gather(ins[n], insides[n], a, "inside");
      across->all_gather(ins[n], acrosses[n], b, "across");
      world.all_gather(ins[n], worlds[n], c, "world");
    }
    for (const Stream& stream : {a, b, c}) stream.synchronize();
    for (int i = 0; i < kNum; ++i) {
      const auto n = std::size_t(i);
      for (int k = 0; k < 2; ++k) {
        ASSERT_EQ(at<std::int32_t>(insides[n], k), 100 * i + 2 * replica + k);
      }
      for (int k = 0; k < 3; ++k) {
        ASSERT_EQ(at<std::int32_t>(acrosses[n], k), 100 * i + 2 * k + shard);
      }
      for (int k = 0; k < 6; ++k) ASSERT_EQ(at<std::int32_t>(worlds[n], k), 100 * i + k);
    }
  });
}

TEST(HybridTest, PartsOfPartsHaveTheirRanks) {
  MessageJob({3, 3}, kLong).run([](ProcessGroup& world) {
    const auto most = world.split(world.rank() % 3 == 2 ? 1 : 0, -world.rank());  // 4 3 1 0, 5 2
    EXPECT_EQ(most->size(), world.rank() % 3 == 2 ? 2 : 4);
    check_collectives(*most);
    if (world.rank() % 3 == 2) return;
    const auto ends = most->split(most->rank() % 3 == 0 ? 0 : 1, world.rank());  // 0 4, 1 3
    EXPECT_EQ(ends->size(), 2);
    EXPECT_EQ(ends->rank(), world.rank() / 3);
    check_collectives(*ends);
  });
}

// Threads of one process make groups with the same processes at once.
TEST(HybridTest, GroupsThatAreMadeAtOnceDoNotTakeEachOthersMessages) {
  MessageJob({2, 2}, std::chrono::seconds(20)).run([](ProcessGroup& world) {
    const int column = world.rank() % 2;
    const auto across = world.split_by([](int r) { return r % 2; });
    const Stream stream = Stream::inline_cpu("comm");
    const Memory memory;
    const std::vector<std::int32_t> value = {world.rank()};
    const Tensor in = Tensor::from<std::int32_t>(memory, {1}, value);
    const Tensor out = Tensor::empty(memory, {2}, DType::kI32, "out");
    for (int i = 0; i < 200; ++i) {
      if (i % 50 == 0) world.barrier("at once");
      const auto again = across->split(0, world.rank());
      ASSERT_NO_THROW(again->all_gather(in, out, stream, "column " + std::to_string(column)));
      for (int k = 0; k < 2; ++k) ASSERT_EQ(at<std::int32_t>(out, k), 2 * k + column);
    }
  });
}

TEST(HybridTest, ASplitThatPutsOthersBetweenRanksOfAProcessIsRefused) {
  std::vector<std::string> said = said_by_threads(
      4,
      [](ProcessGroup& world) -> std::string {
        try {
          world.split(0, world.rank() % 2);
          return "";
        } catch (const std::exception& error) {
          return error.what();
        }
      },
      [](const auto& each) {
        MessageJob({2, 2}, kLong).run(each);
      });
  EXPECT_THAT(said, Each(HasSubstr("[split] expected ranks of one process next to each other, got "
                                   "ranks of others between rank 0 and rank 1 (world:0)")));
}

// What is sent
// ------------------------------------------------------------------------------------------------

TEST(HybridTest, EachProcessSendsForAllOfItsRanksAtOnce) {
  const auto bytes_of = [](const Layout& layout, const std::function<void(ProcessGroup&)>& fn) {
    CountedJob counted(layout);
    counted.job->run(fn);
    return counted.nbytes();
  };
  constexpr std::int64_t kNumel = 300'000, kNbytes = kNumel * 4;
  const auto make = [](std::int64_t numel) {
    return Tensor::zeros(Memory(), {numel}, DType::kF32, "t");
  };
  const Stream stream = Stream::inline_cpu("comm");
  EXPECT_THAT(bytes_of({2, 2},
                       [&](ProcessGroup& group) {
                         group.all_gather(make(kNumel), make(4 * kNumel), stream, "x");
                       }),
              Each(2 * kNbytes));
  EXPECT_THAT(bytes_of({2, 2},
                       [&](ProcessGroup& group) {
                         group.all_to_all(make(4 * kNumel), make(4 * kNumel), stream, "x");
                       }),
              Each(4 * kNbytes));
  EXPECT_THAT(
      bytes_of({2, 2}, [&](ProcessGroup& group) { group.broadcast(make(kNumel), 3, stream, "x"); }),
      ::testing::ElementsAre(0, kNbytes));
  for (const Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes}) {
    // The sums so far go to the second process, and half of the sums come back. Half of what they
    // are added to comes first.
    const std::int64_t starts = accumulate == Accumulate::kYes ? 2 * kNbytes : 0;
    EXPECT_THAT(bytes_of({2, 2},
                         [&](ProcessGroup& group) {
                           group.reduce_scatter(make(4 * kNumel), make(kNumel), accumulate, stream,
                                                "x");
                         }),
                ::testing::ElementsAre(4 * kNbytes, 2 * kNbytes + starts));
    EXPECT_THAT(bytes_of({2, 2},
                         [&](ProcessGroup& group) {
                           group.all_reduce(make(kNumel), make(kNumel), accumulate, stream, "x");
                         }),
                Each(kNbytes));
  }
  // The last process sends all sums once, in parts, which the others give each other.
  EXPECT_THAT(bytes_of({2, 2, 1},
                       [&](ProcessGroup& group) {
                         group.all_reduce(make(kNumel), make(kNumel), Accumulate::kNo, stream, "x");
                       }),
              ::testing::ElementsAre(kNbytes + 3 * 65'536 * 4 - (5 * 65'536 - kNumel) * 4,
                                     kNbytes + 2 * 65'536 * 4, kNbytes));
}

TEST(HybridTest, GroupsInsideAProcessSendNothing) {
  CountedJob counted({2, 2});
  std::atomic<std::int64_t> before = 0;
  counted.job->run([&](ProcessGroup& world) {
    const auto inside = world.split_by([](int r) { return r / 2; });
    world.barrier("made");
    for (const Sent& sent : counted.sent)
      before = std::max<std::int64_t>(before, sent.num_messages);
    world.barrier("counted");
    check_collectives(*inside);
    inside->split(0, 0)->barrier("a part of it");
  });
  for (const Sent& sent : counted.sent) EXPECT_EQ(sent.num_messages, before);
}

TEST(HybridTest, EveryGroupPausesAllProcesses) {
  MessageJob job({2, 2}, kLong);
  std::atomic<int> num_pauses = 0;
  job.world(1).peers.pause = [&]() -> std::shared_ptr<const void> {
    ++num_pauses;
    return nullptr;
  };
  job.run([](ProcessGroup& world) {
    const auto inside = world.split_by([](int r) { return r / 2; });
    const auto across = world.split_by([](int r) { return r % 2; });
    const auto part = inside->split(0, 0);
    if (world.rank() != 2) return;
    for (ProcessGroup* group : {&world, inside.get(), part.get(), across.get()}) {
      static_cast<void>(group->pause_deadline());
    }
  });
  EXPECT_EQ(num_pauses, 4);
}

// Faults
// ------------------------------------------------------------------------------------------------

const Layout kThreeTimesTwo = {2, 2, 2};

TEST(HybridTest, AThreadThatCallsSomethingElseIsNamed) {
  const auto messages = errors_of_job(kThreeTimesTwo, [](ProcessGroup& world) {
    world.barrier("begin");
    world.barrier(world.rank() == 3 ? "b" : "a");
  });
  EXPECT_THAT(messages, Each(messages[0]));
  EXPECT_THAT(messages,
              Each(::testing::AnyOf("[barrier #1 of world] expected rank 2's barrier 'a', got rank "
                                    "3's barrier 'b'",
                                    "[barrier #1 of world] expected rank 3's barrier 'b', got rank "
                                    "2's barrier 'a'")));
}

TEST(HybridTest, AProcessThatCallsSomethingElseIsNamed) {
  const auto messages = errors_of_job(kThreeTimesTwo, [](ProcessGroup& world) {
    world.barrier("begin");
    world.barrier(world.rank() / 2 == 1 ? "b" : "a");
  });
  EXPECT_THAT(messages, Each("[barrier #1 of world] expected rank 0's barrier 'a', got rank 2's "
                             "barrier 'b'"));
}

TEST(HybridTest, WhatWasDeclaredIsComparedInsideAndBetween) {
  for (const bool by_thread : {true, false}) {
    const auto messages = errors_of_job(kThreeTimesTwo, [&](ProcessGroup& world) {
      const bool differs = by_thread ? world.rank() == 3 : world.rank() / 2 == 1;
      world.declare("update h.0");
      world.declare(differs ? "update h.2" : "update h.1");
      world.barrier("end");
    });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("update h.1"), HasSubstr("update h.2"),
                                     HasSubstr(by_thread ? "rank 3's" : "rank 2's"))));
  }
}

TEST(HybridTest, AProcessThatDeclaresMoreThanOthersIsNamed) {
  const auto messages = errors_of_job(kThreeTimesTwo, [&](ProcessGroup& world) {
    if (world.rank() / 2 == 1) world.declare("update h.1");
    world.barrier("end");
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("expected rank 0's barrier 'end'"),
                                   HasSubstr("rank 2's barrier 'end' after 'update h.1'"))));
}

// Waits until the others have given up.
void stay_away(ProcessGroup& world) {
  while (true) {
    world.check();
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(HybridTest, AThreadThatIsLateIsNamed) {
  const auto messages = errors_of_job(
      kThreeTimesTwo,
      [](ProcessGroup& world) {
        world.barrier("begin");
        if (world.rank() == 3) stay_away(world);
        world.barrier("end");
      },
      milliseconds(1000));
  EXPECT_THAT(messages, Each("[barrier #1 of world] expected 2 ranks of process 1 within 1000 ms, "
                             "got 1: rank 3 is missing, last seen in #0 barrier 'begin'; barrier "
                             "'end'"));
}

TEST(HybridTest, AProcessThatIsLateIsNamedByItsRanks) {
  const auto messages = errors_of_job(
      kThreeTimesTwo,
      [](ProcessGroup& world) {
        world.barrier("begin");
        if (world.rank() / 2 == 1) stay_away(world);
        world.barrier("end");
      },
      milliseconds(500));
  EXPECT_THAT(messages, Each("[barrier #1 of world] expected 6 ranks within 500 ms, got 4: ranks "
                             "2-3 are missing, last seen in #0 barrier 'begin'; barrier 'end'"));
}

TEST(HybridTest, WhoHasLeftIsNamed) {
  for (const bool one_thread : {true, false}) {
    const auto messages = errors_of_job(kThreeTimesTwo, [&](ProcessGroup& world) {
      world.barrier("begin");
      if (one_thread ? world.rank() == 3 : world.rank() / 2 == 1) return;
      world.barrier("end");
    });
    const std::string expected =
        one_thread ? "[barrier #1 of world] expected 2 ranks of process 1, got: rank 3 has left "
                     "the group, last seen in #0 barrier 'begin'; barrier 'end'"
                   : "[barrier #1 of world] expected 6 ranks, got: ranks 2-3 have left the group, "
                     "last seen in #0 barrier 'begin'; barrier 'end'";
    for (std::size_t r = 0; r < messages.size(); ++r) {
      const bool left = one_thread ? r == 3 : r / 2 == 1;
      EXPECT_EQ(messages[r], left ? "" : expected);
    }
  }
}

// Of all ranks of a process, whichever of them has the call's messages.
TEST(HybridTest, MemoryOfAMessageThatMayStillComeStays) {
  std::vector<std::weak_ptr<engine::Buffer>> kept(4);
  {
    auto transports = MemoryTransport::make(2);
    transports[0] = std::make_unique<KeepingTransport>(std::move(transports[0]));
    MessageJob job(std::move(transports), {2, 2}, milliseconds(100));
    job.run([&](ProcessGroup& group) {
      const Memory memory;
      const Tensor in = Tensor::zeros(memory, {4}, DType::kF32, "in");
      auto slot = engine::Buffer::create(memory, "slot", 64, engine::Category::kCommunication);
      const auto whole =
          engine::Buffer::create_released(memory, "whole", 64, engine::Category::kCommunication);
      whole->attach(slot);
      kept[std::size_t(group.rank())] = slot;
      EXPECT_THROW(
          {
            group.all_gather(in, Tensor(whole, 0, {16}, DType::kF32), Stream::inline_cpu("comm"),
                             "x");
            group.barrier("end");
          },
          CommError);
      whole->release();
    });
    EXPECT_FALSE(kept[2].expired());
    EXPECT_FALSE(kept[3].expired());
  }
  for (const auto& slot : kept) EXPECT_TRUE(slot.expired());
}

}  // namespace
}  // namespace tessera::comm

// Ranks as processes that send each other messages: the conformance suite, with threads that play
// processes, and what becomes of ranks that leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/messages/message_world.h"
#include "comm/process_group.h"
#include "comm/world/world.h"
#include "engine/elementwise.h"
#include "tests/comm/keeping_transport.h"
#include "tests/comm/memory_transport.h"
#include "tests/comm/message_job.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_threads.h"
#include "tests/testing/sanitizers.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using ::testing::Each;

// Of `size` processes with a rank each.
std::vector<int> one_each(int size) { return std::vector<int>(std::size_t(size), 1); }

auto backends() {
  return ::testing::Values(Backend{
      .name = "messages", .run = [](int size, milliseconds deadline, const RankFunction& fn) {
        return said_by_threads(
            size, fn, [&](const auto& each) { MessageJob(one_each(size), deadline).run(each); });
      }});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

// What `fn` throws as CommError on each rank.
std::vector<std::string> errors_of(int size, const std::function<void(ProcessGroup&)>& fn) {
  return errors_of_job(one_each(size), fn);
}

TEST(MessagesTest, WhoeverWaitsForARankThatHasLeftIsToldItsLastCall) {
  const auto messages = errors_of(3, [](ProcessGroup& group) {
    group.barrier("begin");
    if (group.rank() != 1) group.barrier("end");
  });
  EXPECT_EQ(messages[1], "");
  EXPECT_EQ(messages[0],
            "[barrier #1 of world] expected 3 ranks, got: rank 1 has left the group, last seen in "
            "#0 barrier 'begin'; barrier 'end'");
  EXPECT_EQ(messages[2], messages[0]);
}

TEST(MessagesTest, ARankMayLeaveAsSoonAsItsCallsAreDone) {
  for (int i = 0; i < 100; ++i) {
    EXPECT_THAT(errors_of(3, [](ProcessGroup& group) { group.barrier("end"); }), Each(""));
  }
}

TEST(MessagesTest, WhatWasDeclaredIsComparedWithTheNextCall) {
  const auto messages = errors_of(2, [](ProcessGroup& group) {
    group.declare("update h.0");
    group.declare(group.rank() == 0 ? "update h.1" : "update h.2");
    group.barrier("end");
  });
  EXPECT_THAT(messages, Each("[barrier #0 of world] expected rank 0's barrier 'end' after 'update "
                             "h.0; update h.1', got rank 1's barrier 'end' after 'update h.0; "
                             "update h.2'"));
}

// The sums are those of threads in all else; here what is sent counts.
TEST(MessagesTest, CountsTheBytesOfEachRank) {
  std::vector<std::int64_t> sent(3);
  MessageJob(one_each(3), kLong).run([&](ProcessGroup& group) {
    const Stream stream = Stream::inline_cpu("comm");
    const Memory memory;
    const Tensor in = Tensor::zeros(memory, {300}, DType::kBF16, "in");
    const Tensor sum = Tensor::zeros(memory, {300}, DType::kF32, "sum");
    group.all_reduce(in, sum, Accumulate::kNo, stream, "sum");
    sent[std::size_t(group.rank())] = group.traffic().bytes_sent;
  });
  // Parts of 128, 128 and 44 elements: what goes to the others in bf16, and what comes back in f32.
  EXPECT_THAT(sent, ::testing::ElementsAre(172 * 2 + 2 * 128 * 4, 172 * 2 + 2 * 128 * 4,
                                           256 * 2 + 2 * 44 * 4));
}

TEST(MessagesTest, AGroupOfOneRankEndsWithItsWorld) {
  const auto messages = errors_of(2, [](ProcessGroup& world) {
    const auto alone = world.split(world.rank(), 0);
    alone->barrier("begin");
    world.barrier("begin");
    if (world.rank() == 0) world.abort("the cause");
    for (int i = 0; i < 10'000; ++i) {
      alone->barrier("alone");
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  EXPECT_THAT(messages, Each("[abort] by rank 0: the cause"));
}

// Some ranks have had more groups than others when all make one.
TEST(MessagesTest, RanksThatHaveHadMoreGroupsThanOthersMakeOneWithThem) {
  MessageJob(one_each(3), std::chrono::seconds(20)).run([](ProcessGroup& world) {
    const auto pair = world.split(world.rank() / 2, 0);
    std::vector<std::unique_ptr<ProcessGroup>> more;
    for (int i = 0; i < 3 && world.rank() < 2; ++i) more.push_back(pair->split(0, 0));
    const auto all = world.split(0, 0);
    for (const auto& group : more) group->barrier("in a pair");
    all->barrier("in all");
  });
}

// On one stream a call waits, while so many are made on another that its tag comes again.
TEST(MessagesTest, ACallThatOthersOvertakeByAllTagsFails) {
  const auto messages = errors_of(2, [](ProcessGroup& group) {
    const Memory memory;
    const Tensor in = Tensor::zeros(memory, {1}, DType::kI32, "in");
    std::vector<Tensor> outs;
    const auto gather = [&](const Stream& stream) {
      outs.push_back(Tensor::zeros(memory, {2}, DType::kI32, "out"));
      group.all_gather(in, outs.back(), stream, "x");
    };
    std::promise<void> opened;
    const Stream gate = Stream::worker_cpu("gate"), gated = Stream::worker_cpu("gated");
    const Stream others = Stream::inline_cpu("others");
    if (group.rank() == 0) {
      gate.launch({.name = "wait"}, [&] { opened.get_future().wait(); });
      gated.wait(gate.record("open"));
    }
    std::exception_ptr error;
    try {
      gather(gated);
      for (int i = 0; i < 1024; ++i) gather(others);
    } catch (const CommError&) {
      error = std::current_exception();
    }
    opened.set_value();
    if (error) std::rethrow_exception(error);
    gated.synchronize();
  });
  EXPECT_THAT(messages,
              Each("[all_gather #1024 of world] expected rank 0's all_gather i32 x 1 'x', "
                   "got rank 1's #0 all_gather i32 x 1 'x'"));
}

// Rank 0 comes to the calls of two groups in another order than rank 1.
TEST(MessagesTest, CallsOfTwoGroupsDoNotTakeEachOthersMessages) {
  MessageJob(one_each(2), std::chrono::seconds(20)).run([](ProcessGroup& world) {
    const auto same = world.split(0, world.rank());
    same->barrier("so that both have had one call");
    const Memory memory;
    const Tensor in = Tensor::zeros(memory, {1}, DType::kI32, "in");
    const Tensor a = Tensor::zeros(memory, {2}, DType::kI32, "a");
    const Tensor b = Tensor::zeros(memory, {2}, DType::kI32, "b");
    std::promise<void> opened;
    const Stream gate = Stream::worker_cpu("gate"), gated = Stream::worker_cpu("gated");
    if (world.rank() == 0) {
      gate.launch({.name = "wait"}, [&] { opened.get_future().wait(); });
      gated.wait(gate.record("open"));
    }
    world.all_gather(in, a, gated, "of the world");
    same->all_gather(in, b, Stream::inline_cpu("beside"), "of the others");
    opened.set_value();
    EXPECT_NO_THROW(gated.synchronize());
  });
}

// A message may come after the call that waits for it has failed, and what it is written to has
// been released.
TEST(MessagesTest, MemoryOfAMessageThatMayStillComeStays) {
  std::weak_ptr<engine::Buffer> kept;
  {
    auto transports = MemoryTransport::make(2);
    transports[0] = std::make_unique<KeepingTransport>(std::move(transports[0]));
    MessageJob job(std::move(transports), one_each(2), milliseconds(100));
    job.run([&](ProcessGroup& group) {
      const Memory memory;
      constexpr std::int64_t kNumel = 8192;  // more than is received apart from where it belongs
      constexpr std::int64_t kNbytes = 2 * kNumel * 4;
      const Tensor in = Tensor::zeros(memory, {kNumel}, DType::kF32, "in");
      auto slot = engine::Buffer::create(memory, "slot", kNbytes, engine::Category::kCommunication);
      const auto whole = engine::Buffer::create_released(memory, "whole", kNbytes,
                                                         engine::Category::kCommunication);
      whole->attach(slot);
      const Stream stream = Stream::inline_cpu("comm");
      if (group.rank() == 1) kept = slot;
      EXPECT_THROW(
          {
            group.all_gather(in, Tensor(whole, 0, {2 * kNumel}, DType::kF32), stream, "x");
            group.barrier("end");
          },
          CommError);
      whole->release();
    });
    EXPECT_FALSE(kept.expired());
  }
  EXPECT_TRUE(kept.expired());
}

TEST(MessagesTest, TheTransportOfAWorldThatHasFailedIsToldSo) {
  class Told final : public MemoryTransport {
   public:
    explicit Told(bool& told)
        : MemoryTransport(std::make_shared<MemoryMailboxes>(), 0, 2), told_(told) {}
    void give_up() noexcept override { told_ = true; }

   private:
    bool& told_;
  };
  for (const bool fails : {false, true}) {
    bool told = false;
    {
      MessageWorld shared;
      shared.world = std::make_shared<World>(kLong, [](const std::string&) {});
      shared.transport = std::make_shared<Told>(told);
      if (fails) shared.world->abort("a process was lost");
    }
    EXPECT_EQ(told, fails);
  }
}

// Short data comes along with the fingerprints.
TEST(MessagesTest, NothingIsTakenOfACallThatDiffers) {
  const auto messages = errors_of(2, [](ProcessGroup& group) {
    const Memory memory;
    const Tensor in = Tensor::zeros(memory, {4}, DType::kF32, "in");
    const std::vector<float> before(8, 1.0F);
    const Tensor out = Tensor::from<float>(memory, {8}, before, "out");
    const Stream stream = Stream::inline_cpu("comm");
    EXPECT_THROW(group.all_gather(in, out, stream, group.rank() == 0 ? "a" : "b"), CommError);
    EXPECT_THAT(std::vector<float>(out.data<float>(), out.data<float>() + 8), Each(1.0F));
    group.check();
  });
  EXPECT_THAT(messages, Each(::testing::HasSubstr("got rank 1's all_gather f32 x 4 'b'")));
}

// A number of rank `rank` at `i` that f32 and bf16 hold.
float summand(int rank, std::int64_t i) {
  const auto x = static_cast<std::uint32_t>(i * 3 + rank) * 2654435761U;
  return static_cast<float>(x >> 24) * (rank == 1 ? 0x1p20F : 0.5F);
}

// So long that pieces take each other's place where they are received. The sums must be those in
// rank order: the large numbers of rank 1 swallow digits of the others.
TEST(MessagesTest, SumsOfManyPieces) {
  const DType dtypes[] = {DType::kF32, DType::kBF16};
  for (const DType dtype : std::span(dtypes, testing::at_most_if_slow(1, 2))) {
    MessageJob(one_each(3), std::chrono::seconds(60)).run([&](ProcessGroup& group) {
      const std::int64_t block = 1'100'003, all = 3 * block;
      const Memory memory;
      const Stream stream = Stream::inline_cpu("comm");
      std::vector<float> values, starts;
      for (std::int64_t i = 0; i < all; ++i) {
        values.push_back(summand(group.rank(), i));
        starts.push_back(static_cast<float>(i % 7));
      }
      Tensor in = Tensor::from<float>(memory, {all}, values, "in");
      if (dtype == DType::kBF16) {
        const Tensor narrow = Tensor::zeros(memory, {all}, dtype, "narrow");
        engine::cast(narrow, in);
        in = narrow;
      }
      const Tensor sum = Tensor::from<float>(memory, {all}, starts, "sum");
      const Tensor own = Tensor::zeros(memory, {block}, DType::kF32, "own");
      group.all_reduce(in, sum, Accumulate::kYes, stream, "sum");
      group.reduce_scatter(in, own, Accumulate::kNo, stream, "own");
      std::int64_t num_wrong = 0;
      for (std::int64_t i = 0; i < all; ++i) {
        float expected = starts[static_cast<std::size_t>(i)];
        for (int r = 0; r < 3; ++r) expected += summand(r, i);
        num_wrong += sum.data<float>()[i] != expected;
      }
      for (std::int64_t i = 0; i < block; ++i) {
        const std::int64_t at = group.rank() * block + i;
        const float expected = (summand(0, at) + summand(1, at)) + summand(2, at);
        num_wrong += own.data<float>()[i] != expected;
      }
      EXPECT_EQ(num_wrong, 0);
    });
  }
}

}  // namespace
}  // namespace tessera::comm

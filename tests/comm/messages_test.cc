// Ranks as processes that send each other messages: the conformance suite, with threads that play
// processes, and what becomes of ranks that leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/messages/message_group.h"
#include "comm/process_group.h"
#include "comm/world/world.h"
#include "tests/comm/memory_transport.h"
#include "tests/comm/process_group_faults.h"
#include "tests/comm/process_group_suite.h"

namespace tessera::comm {
namespace {

// Stands for the control plane: carries the first failure of a world to the others, and knows who
// has left.
class Job {
 public:
  Job(int size, milliseconds deadline) : left_(std::size_t(size)) {
    auto transports = MemoryTransport::make(size);
    for (auto& transport : transports) {
      auto world = std::make_shared<MessageWorld>();
      world->world = std::make_shared<World>(deadline, [this](const std::string& m) { fail(m); });
      world->transport = std::move(transport);
      world->has_left = [this](int rank) { return left_[std::size_t(rank)].load(); };
      worlds_.push_back(std::move(world));
    }
    carrier_ = std::thread([this] { carry(); });
  }
  ~Job() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    carrier_.join();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Runs `fn` on a thread a rank.
  void run(const std::function<void(ProcessGroup&)>& fn) {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < worlds_.size(); ++r) {
      threads.emplace_back([this, r, &fn] {
        const auto group = make_message_group(worlds_[r]);
        fn(*group);
        left_[r] = true;
      });
    }
  }

 private:
  void fail(const std::string& message) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = message;
    }
    changed_.notify_all();
  }

  void carry() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ || !failure_.empty(); });
    lock.unlock();
    if (failure_.empty()) return;
    for (const auto& world : worlds_) world->world->abort(failure_);
  }

  std::vector<std::shared_ptr<MessageWorld>> worlds_;
  std::vector<std::atomic<bool>> left_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
  bool ended_ = false;
  std::thread carrier_;
};

Stream here(int, std::string name, engine::StreamOptions options) {
  return Stream::inline_cpu(std::move(name), options);
}

Stream beside(int, std::string name, engine::StreamOptions options) {
  return Stream::worker_cpu(std::move(name), options);
}

INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest,
                         ::testing::Values(Backend{
                             .name = "messages",
                             .run =
                                 [](int size, milliseconds deadline, const RankFunction& fn) {
                                   return said_by_threads(size, fn, [&](const auto& each) {
                                     Job(size, deadline).run(each);
                                   });
                                 },
                             .here = here,
                             .beside = beside}),
                         [](const auto& info) { return info.param.name; });

// What `fn` throws as CommError on each rank.
std::vector<std::string> errors_of(int size, const std::function<void(ProcessGroup&)>& fn) {
  return said_by_threads(
      size,
      [&](ProcessGroup& group) -> std::string {
        try {
          fn(group);
          return "";
        } catch (const CommError& error) {
          return error.what();
        }
      },
      [&](const auto& each) { Job(size, kLong).run(each); });
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
  Job(3, kLong).run([&](ProcessGroup& group) {
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

}  // namespace
}  // namespace tessera::comm

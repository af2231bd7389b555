// Ranks that differ, are late or end, and arguments that cannot be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/process_group.h"
#include "engine/error.h"
#include "engine/tensor.h"
#include "tests/comm/process_group_suite.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::InvalidArgument;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

TEST_P(ProcessGroupTest, DeadlineNamesWhoIsMissingAndWhatItDidLast) {
  const auto messages = errors(
      3,
      [](ProcessGroup& group) {
        const Caller c{group, place(group.rank())};
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
      GetParam().deadline);
  EXPECT_THAT(messages,
              Each(AllOf(HasSubstr("[reduce_scatter #1 of world]"),
                         HasSubstr("within " + std::to_string(GetParam().deadline.count()) + " ms"),
                         HasSubstr("rank 1 is missing, last seen in #0 all_gather f32 x 4 'h.0'"),
                         HasSubstr("reduce_scatter f32 x 4 'h.1'"))));
}

TEST_P(ProcessGroupTest, AbortWakesSleepersAndStays) {
  const auto messages = errors(4, [](ProcessGroup& group) {
    const Caller c{group, place(group.rank())};
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
    const Caller c{group, {GetParam().beside(group.rank(), "comm", {})}, false};
    if (group.rank() == 2) group.abort("the cause");
    for (int i = 0; i < 100; ++i) c.gather(4, "h.0");
    c.wait();
  });
  EXPECT_THAT(messages, Each(HasSubstr("the cause")));
}

TEST_P(ProcessGroupTest, BadArgumentsThrowBeforeAnythingIsSent) {
  run(2, [](ProcessGroup& group) {
    const Caller c{group, place(group.rank())};
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
      return [&, in, out] { group.all_gather(in, out, c.place.stream, "x"); };
    };
    const auto scatter = [&](const Tensor& in, const Tensor& out, Accumulate accumulate) {
      return [&, in, out, accumulate] {
        group.reduce_scatter(in, out, accumulate, c.place.stream, "x");
      };
    };
    const auto reduce = [&](const Tensor& in, const Tensor& out, Accumulate accumulate) {
      return
          [&, in, out, accumulate] { group.all_reduce(in, out, accumulate, c.place.stream, "x"); };
    };
    const auto transpose = [&](const Tensor& in, const Tensor& out) {
      return [&, in, out] { group.all_to_all(in, out, c.place.stream, "x"); };
    };
    const auto broadcast = [&](const Tensor& inout, int root) {
      return [&, inout, root] { group.broadcast(inout, root, c.place.stream, "x"); };
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

    // Neighbours in a buffer do not overlap.
    const Tensor room = c.make(12);
    group.all_gather(room.slice(8, {4}), room.slice(0, {8}), c.place.stream, "before");
    group.all_gather(room.slice(0, {4}), room.slice(4, {8}), c.place.stream, "behind");

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
    const Caller c{group, place(group.rank(), {.listener = &listener})};
    c.gather(10, "h.0");
    c.scatter(10, "h.1", DType::kBF16);
    EXPECT_EQ(listener.seen,
              (std::vector<std::string>{"all_gather h.0 40 80", "reduce_scatter h.1 40 40"}));
  });
}

}  // namespace
}  // namespace tessera::comm

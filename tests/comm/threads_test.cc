// Ranks as threads: how a world of them ends.
#include "comm/threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "engine/tensor.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using ::testing::AllOf;
using ::testing::HasSubstr;

const ThreadsOptions kLong{.deadline = std::chrono::hours(1)};  // waiting for it fails the test

struct LoaderError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void gather(ProcessGroup& group, const Stream& stream) {
  const Memory memory;
  group.all_gather(Tensor::empty(memory, {4}, DType::kU8, "in"),
                   Tensor::empty(memory, {4 * group.size()}, DType::kU8, "out"), stream, "h.0");
}

// What `fn` throws as CommError.
template <class F>
std::string comm_error(F&& fn) {
  try {
    fn();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

TEST(RunRanksTest, EveryRankRunsOnceWithItsNumber) {
  std::vector<std::atomic<int>> runs(8);
  run_ranks(8, {}, [&](ProcessGroup& world) {
    EXPECT_EQ(world.size(), 8);
    ++runs[static_cast<std::size_t>(world.rank())];
  });
  for (const auto& n : runs) EXPECT_EQ(n, 1);
}

TEST(RunRanksTest, RethrowsTheRootCauseAndTellsEveryRank) {
  std::atomic<int> echoes = 0;
  try {
    run_ranks(4, kLong, [&](ProcessGroup& world) {
      const auto part = world.split(0, 0);
      const Stream stream = Stream::worker_cpu("comm");
      for (int i = 0; i < 10; ++i) gather(*part, stream);
      if (world.rank() == 2) throw LoaderError("no more data");
      const std::string message = comm_error([&] {
        for (int i = 0; i < 10; ++i) gather(*part, stream);
        stream.synchronize();
      });
      EXPECT_THAT(message, AllOf(HasSubstr("rank 2"), HasSubstr("no more data")));
      ++echoes;
      world.check();
    });
    FAIL() << "expected an error";
  } catch (const LoaderError& error) {
    EXPECT_STREQ(error.what(), "no more data");
  }
  EXPECT_EQ(echoes, 3);
}

TEST(RunRanksTest, AnAbortBeforeTheThrowIsAnEchoOfIt) {
  std::atomic<bool> others_gone = false;
  const auto fn = [&](ProcessGroup& world) {
    if (world.rank() == 0) {
      world.abort("about to throw");
      while (!others_gone) std::this_thread::yield();
      throw LoaderError("no more data");
    }
    try {
      world.barrier("wait");
    } catch (...) {
      others_gone = true;
      throw;
    }
  };
  EXPECT_THROW(run_ranks(2, kLong, fn), LoaderError);
}

TEST(RunRanksTest, RethrowsWhatIsNotAnException) {
  EXPECT_THROW(run_ranks(2, kLong,
                         [](ProcessGroup& world) {
                           if (world.rank() == 0) throw 7;
                           world.barrier("wait");
                         }),
               int);
}

TEST(RunRanksTest, TellsTheOthersOfWhatIsNotAnException) {
  std::string told;
  EXPECT_THROW(run_ranks(2, kLong,
                         [&](ProcessGroup& world) {
                           if (world.rank() == 1) throw 42;
                           told = comm_error([&] { world.barrier("step"); });
                         }),
               int);
  EXPECT_THAT(told, AllOf(HasSubstr("rank 1"), HasSubstr("an exception of unknown type")));
}

TEST(RunRanksTest, RethrowsWhatTheWorldFailedWith) {
  const std::string message = comm_error([] {
    run_ranks(3, kLong, [](ProcessGroup& world) { world.barrier(world.rank() == 1 ? "a" : "b"); });
  });
  EXPECT_THAT(message, AllOf(HasSubstr("barrier 'a'"), HasSubstr("barrier 'b'")));
}

TEST(RunRanksTest, ARankThatReturnsEarlyIsNamedAtOnce) {
  for (const bool in_part : {false, true}) {
    const std::string message = comm_error([&] {
      run_ranks(3, kLong, [&](ProcessGroup& world) {
        const auto part = world.split(0, 0);
        ProcessGroup& group = in_part ? *part : world;
        group.barrier("together");
        if (world.rank() != 1) group.barrier("alone");
      });
    });
    EXPECT_THAT(message, AllOf(HasSubstr("barrier 'alone'"),
                               HasSubstr("rank 1 has left the group, last seen in"),
                               HasSubstr("barrier 'together'")));
  }
}

TEST(RunRanksTest, LeavingWithCollectivesOnAStreamIsOrderly) {
  std::vector<Stream> streams;
  for (std::uint64_t r = 0; r < 3; ++r) {
    streams.push_back(Stream::worker_cpu("comm", {.delay_seed = r + 1}));
  }
  run_ranks(3, kLong, [&](ProcessGroup& world) {
    for (int i = 0; i < 20; ++i) gather(world, streams[static_cast<std::size_t>(world.rank())]);
  });
  for (const Stream& stream : streams) EXPECT_NO_THROW(stream.synchronize());
}

TEST(RunRanksTest, ThrowingWithCollectivesOnAStreamEnds) {
  // Each rank unwinds a stream with collectives that the others never join.
  EXPECT_THROW(run_ranks(3, kLong,
                         [](ProcessGroup& world) {
                           const Stream stream = Stream::worker_cpu("comm");
                           for (int i = 0; i < 10 * world.rank(); ++i) gather(world, stream);
                           throw LoaderError("no more data");
                         }),
               LoaderError);
}

TEST(ThreadsWorldTest, AGroupThatIsDestroyedHasLeft) {
  auto groups = make_threads_world(2, kLong);
  std::string message;
  std::thread waiting([&] { message = comm_error([&] { groups[0]->barrier("wait"); }); });
  groups[1].reset();
  waiting.join();
  EXPECT_THAT(message, HasSubstr("rank 1 has left the group, last seen in nothing"));
}

TEST(ThreadsWorldTest, WorldsFailAlone) {
  auto a = make_threads_world(1, kLong);
  auto b = make_threads_world(1, kLong);
  a[0]->abort("only a");
  EXPECT_THROW(a[0]->barrier("a"), CommError);
  EXPECT_NO_THROW(b[0]->barrier("b"));
  EXPECT_NO_THROW(b[0]->check());
}

TEST(ThreadsWorldTest, RefusesNonsense) {
  EXPECT_THROW(make_threads_world(0), engine::InvalidArgument);
  EXPECT_THROW(make_threads_world(1, {.deadline = std::chrono::milliseconds(0)}),
               engine::InvalidArgument);
  EXPECT_THROW(run_ranks(-1, {}, [](ProcessGroup&) {}), engine::InvalidArgument);
}

}  // namespace
}  // namespace tessera::comm

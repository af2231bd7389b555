// The conformance suite with ranks that are threads of processes, which comm::join_ranks() connects
// over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tests/comm/forked_processes.h"
#include "tests/comm/joined_processes.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_processes.h"

namespace tessera::comm {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// Of a join that nobody waits too long for.
JoinOptions patient(JoinOptions options) {
  options.control.deadline = kLong;
  return options;
}

std::vector<std::string> said_over_gloo(int num_processes,
                                        const std::function<std::string(const JoinOptions&)>& fn) {
  const MeetingPlace place(num_processes);
  return said_by_processes(num_processes,
                           [&](int process) { return fn(place.options(process, kLong)); });
}

// Two ranks a process where their number is even.
std::vector<std::string> by_threads_over_gloo(int size, milliseconds deadline,
                                              const RankFunction& fn) {
  const int num_threads = size % 2 == 0 ? 2 : 1;
  const MeetingPlace place(size / num_threads);
  return said_by_threads_of_processes(
      size, num_threads, fn, [&](int process, const std::function<void(ProcessGroup&)>& each) {
        run_joined_ranks(num_threads, patient(place.options(process, deadline)), each);
      });
}

auto backends() {
  return ::testing::Values(Backend{.name = "gloo_and_threads",
                                   .run = by_threads_over_gloo,
                                   .num_large = 70'001,
                                   .deadline = milliseconds(1000),
                                   .sizes = {2, 4}});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

TEST(JoinedThreadsTest, EachHasItsRank) {
  const auto said = said_over_gloo(2, [](const JoinOptions& options) {
    std::string ranks;
    for (const auto& group : join_ranks(3, options)) {
      ranks += std::to_string(group->rank()) + " of " + std::to_string(group->size()) + ", ";
    }
    return ranks;
  });
  EXPECT_EQ(said,
            (std::vector<std::string>{"0 of 6, 1 of 6, 2 of 6, ", "3 of 6, 4 of 6, 5 of 6, "}));
}

TEST(JoinedThreadsTest, ProcessesHaveTheSameNumberOfThem) {
  const auto said = said_over_gloo(2, [](const JoinOptions& options) -> std::string {
    try {
      run_joined_ranks(2 + options.control.process, options, [](ProcessGroup&) {});
      return "";
    } catch (const engine::Error& error) {
      return error.what();
    }
  });
  EXPECT_THAT(said, Each(HasSubstr("[join] expected the number of threads of process 0, 2, got 3 "
                                   "(process 1)")));
}

TEST(JoinedThreadsTest, AProcessThatIsKilledEndsTheThreadsOfTheOthers) {
  const MeetingPlace place(2);
  const ForkedProcesses processes(2, [&](int process, const AllGatherTexts&) -> std::string {
    JoinOptions options = place.options(process, kLong);
    std::vector<std::string> said(2);
    try {
      run_joined_ranks(2, options, [&](ProcessGroup& world) {
        world.barrier("begin");
        if (world.rank() == 3) ::kill(::getpid(), SIGKILL);
        try {
          world.barrier("end");
        } catch (const CommError& error) {
          said[std::size_t(world.rank())] = error.what();
          throw;
        }
      });
    } catch (const CommError& error) {
      return said == std::vector<std::string>(2, error.what()) ? error.what() : "others";
    }
    return "no error";
  });
  EXPECT_THAT(processes.outcome(0), HasSubstr("lost process 1 ("));
}

}  // namespace
}  // namespace tessera::comm

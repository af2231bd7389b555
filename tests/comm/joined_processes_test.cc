// The conformance suite with ranks that are processes, which comm::join() connects over Gloo.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/joined_processes.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_processes.h"
#include "tests/testing/sanitizers.h"

namespace tessera::comm {
namespace {

std::vector<std::string> over_gloo(int size, milliseconds deadline, const RankFunction& fn) {
  const MeetingPlace place(size);
  return said_by_processes(
      size,
      [&](int process) {
        JoinOptions options = place.options(process, deadline);
        options.control.deadline = kLong;
        return join(options);
      },
      fn);
}

auto backends() {
  return ::testing::Values(Backend{
      .name = "gloo",
      .run = over_gloo,
      .num_large = 20011,
      .deadline = milliseconds(1000),
      .sizes = testing::kIsSlow ? std::vector<int>{1, 2, 3} : std::vector<int>{1, 2, 3, 4}});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

TEST(JoinedProcessesTest, WhatFailsInAProcessFailsTheTest) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(over_gloo(2, kLong,
                                                   [](ProcessGroup& group) -> std::string {
                                                     EXPECT_EQ(group.rank(), 0) << "only there";
                                                     return "";
                                                   }),
                                         "process 1 failed tests/comm/joined_processes_test.cc");
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(over_gloo(2, kLong,
                                                   [](ProcessGroup& group) -> std::string {
                                                     if (group.rank() == 1)
                                                       throw std::runtime_error("no more");
                                                     return "";
                                                   }),
                                         "process 1 failed no more");
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(over_gloo(2, kLong,
                                                   [](ProcessGroup& group) -> std::string {
                                                     if (group.rank() == 1)
                                                       ::kill(::getpid(), SIGKILL);
                                                     return "";
                                                   }),
                                         "process 1 gone");
}

}  // namespace
}  // namespace tessera::comm

// The conformance suite with ranks that are processes, which comm::join() connects over Gloo.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/forked_processes.h"
#include "tests/comm/joined_processes.h"
#include "tests/comm/process_group_faults.h"
#include "tests/comm/process_group_suite.h"
#include "tests/testing/sanitizers.h"

namespace tessera::comm {
namespace {

// What a process tells the test: what it says, or how its expectations failed.
std::string report_of(const std::function<std::string()>& fn) {
  ::testing::TestPartResultArray parts;
  std::string said, failures;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &parts);
    try {
      said = fn();
    } catch (const std::exception& error) {
      failures = error.what();
    }
  }
  for (int i = 0; i < parts.size(); ++i) {
    const ::testing::TestPartResult& part = parts.GetTestPartResult(i);
    if (!part.failed()) continue;
    failures += std::string(part.file_name()) + ":" + std::to_string(part.line_number()) + ": " +
                part.message() + "\n";
  }
  return failures.empty() ? "said " + said : "failed " + failures;
}

// Runs `fn` in `size` processes, and returns what each says. What fails in one fails the test.
std::vector<std::string> said_by_processes(int size, milliseconds deadline,
                                           const RankFunction& fn) {
  const MeetingPlace place(size);
  const ForkedProcesses processes(size, [&](int process, const AllGatherTexts&) {
    return report_of([&] {
      JoinOptions options = place.options(process, deadline);
      options.control.deadline = kLong;
      return fn(*join(options));
    });
  });
  std::vector<std::string> said = processes.outcomes();
  for (std::size_t p = 0; p < said.size(); ++p) {
    if (!said[p].starts_with("said ")) ADD_FAILURE() << "process " << p << " " << said[p];
    said[p] = said[p].substr(std::min(said[p].size(), said[p].find(' ') + 1));
  }
  return said;
}

INSTANTIATE_TEST_SUITE_P(
    Backends, ProcessGroupTest,
    ::testing::Values(Backend{
        .name = "gloo",
        .run = said_by_processes,
        .here = [](int, std::string name,
                   auto options) { return Stream::inline_cpu(std::move(name), options); },
        .beside = [](int, std::string name,
                     auto options) { return Stream::worker_cpu(std::move(name), options); },
        .num_large = 20011,
        .deadline = milliseconds(300),
        .sizes = testing::kIsSlow ? std::vector<int>{1, 2, 3} : std::vector<int>{1, 2, 3, 4}}),
    [](const auto& info) { return info.param.name; });

TEST(JoinedProcessesTest, WhatFailsInAProcessFailsTheTest) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(said_by_processes(2, kLong,
                                                           [](ProcessGroup& group) -> std::string {
                                                             EXPECT_EQ(group.rank(), 0)
                                                                 << "only there";
                                                             return "";
                                                           }),
                                         "process 1 failed tests/comm/joined_processes_test.cc");
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(said_by_processes(2, kLong,
                                                           [](ProcessGroup& group) -> std::string {
                                                             if (group.rank() == 1)
                                                               throw std::runtime_error("no more");
                                                             return "";
                                                           }),
                                         "process 1 failed no more");
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(said_by_processes(2, kLong,
                                                           [](ProcessGroup& group) -> std::string {
                                                             if (group.rank() == 1)
                                                               ::kill(::getpid(), SIGKILL);
                                                             return "";
                                                           }),
                                         "process 1 gone");
}

}  // namespace
}  // namespace tessera::comm

// The conformance suite with ranks that are threads of processes, which comm::join_ranks() connects
// over Gloo.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/forked_processes.h"
#include "tests/comm/joined_processes.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_processes.h"

namespace tessera::comm {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// Texts of any bytes as one.
std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) {
    const std::uint64_t size = text.size();
    all.append(reinterpret_cast<const char*>(&size), sizeof(size));
    all += text;
  }
  return all;
}

std::vector<std::string> unpacked(const std::string& all) {
  std::vector<std::string> texts;
  for (std::size_t at = 0; at < all.size();) {
    std::uint64_t size = 0;
    std::memcpy(&size, all.data() + at, sizeof(size));
    texts.push_back(all.substr(at + sizeof(size), size));
    at += sizeof(size) + size;
  }
  return texts;
}

// Joins that nobody waits too long for.
std::vector<std::string> said_over_gloo(int num_processes, milliseconds deadline,
                                        const std::function<std::string(const JoinOptions&)>& fn) {
  const MeetingPlace place(num_processes);
  return said_by_processes(num_processes, [&](int process) {
    JoinOptions options = place.options(process, deadline);
    options.control.deadline = kLong;
    return fn(options);
  });
}

// Two ranks a process where their number is even.
std::vector<std::string> said_by_threads_of_processes(int size, milliseconds deadline,
                                                      const RankFunction& fn) {
  const int num_threads = size % 2 == 0 ? 2 : 1;
  const auto run = [&](const JoinOptions& options) {
    std::vector<std::string> said(static_cast<std::size_t>(num_threads));
    run_joined_ranks(num_threads, options, [&](ProcessGroup& world) {
      said[std::size_t(world.rank() % num_threads)] = fn(world);
    });
    return packed(said);
  };
  std::vector<std::string> said;
  for (const std::string& all : said_over_gloo(size / num_threads, deadline, run)) {
    for (std::string& text : unpacked(all)) said.push_back(std::move(text));
  }
  return said;
}

auto backends() {
  return ::testing::Values(Backend{.name = "gloo_and_threads",
                                   .run = said_by_threads_of_processes,
                                   .num_large = 70'001,
                                   .deadline = milliseconds(1000),
                                   .sizes = {2, 4}});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

TEST(JoinedThreadsTest, EachHasItsRank) {
  const auto said = said_over_gloo(2, kLong, [](const JoinOptions& options) {
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
  const auto said = said_over_gloo(2, kLong, [](const JoinOptions& options) -> std::string {
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

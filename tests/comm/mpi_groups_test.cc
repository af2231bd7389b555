// The conformance suite with ranks that are processes over MPI: mpi_group_process.cc is what the
// launcher starts. Skipped where it is not installed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/comm/control_processes.h"
#include "tests/testing/program.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

struct Job {
  std::vector<std::string> lines;
  std::string all;  ///< what they printed
};

class MpiGroupsTest : public ::testing::Test {
 protected:
  // `num_processes` of the program, and those of their lines that begin with one of `words`.
  static Job run(int num_processes, const std::vector<std::string>& words,
                 const std::vector<std::string>& options, const std::string& what = "") {
    const std::string program = std::filesystem::absolute("tests/comm/mpi_group_process").string();
    std::vector<std::string> arguments = {"--oversubscribe", "--bind-to", "none",
                                          "--quiet",         "--timeout", "250"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    std::random_device random;
    for (const std::string& word : {std::string("-n"), std::to_string(num_processes), program,
                                    tcp() + "+15", std::to_string(random())}) {
      arguments.push_back(word);
    }
    if (!what.empty()) arguments.push_back(what);
    const auto outcome = testing::run_program(
        kLauncher, arguments,
        {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
    Job job{{}, outcome.out + outcome.err};
    std::istringstream text(outcome.out);
    for (std::string line; std::getline(text, line);) {
      const auto begins = [&](const std::string& word) { return line.starts_with(word); };
      if (std::ranges::any_of(words, begins)) job.lines.push_back(line);
    }
    return job;
  }

  static constexpr const char* kLauncher = "/usr/bin/mpirun.openmpi";
};

TEST_F(MpiGroupsTest, KeepTheirPromises) {
  const Job job = run(6, {"passed ", "failed"}, {});
  // All have run the same tests, and there are some.
  ASSERT_THAT(job.lines, SizeIs(6)) << job.all;
  EXPECT_THAT(job.lines, Each(AllOf(job.lines[0], StartsWith("passed "), Not("passed 0"))))
      << job.all;
}

// The launcher is told not to end them itself, which it does a second later, without a reason.
TEST_F(MpiGroupsTest, NameAProcessThatIsKilled) {
  const Job job = run(3, {"told "}, {"--enable-recovery"}, "dies");
  ASSERT_THAT(job.lines, SizeIs(2)) << job.all;
  EXPECT_THAT(job.lines, Each(HasSubstr("lost process 1 (")));
}

}  // namespace
}  // namespace tessera::comm

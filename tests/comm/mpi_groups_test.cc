// The conformance suite with ranks that are processes over MPI, or threads of several:
// mpi_group_process.cc is what each launcher that is installed starts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/comm/control_processes.h"
#include "tests/testing/mpi_launcher.h"
#include "tests/testing/program.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

struct Job {
  std::vector<std::string> lines;
  std::string all;  ///< what they printed
};

class MpiGroupsTest : public ::testing::TestWithParam<testing::MpiLauncher> {
 protected:
  // `num_processes` of the program, and those of their lines that begin with one of `words`.
  static Job run(int num_processes, const std::vector<std::string>& words,
                 const std::vector<std::string>& options, const std::string& what = "") {
    const testing::MpiLauncher& launcher = GetParam();
    const std::string program = std::filesystem::absolute("tests/comm/mpi_group_process").string();
    std::vector<std::string> arguments = launcher.options;
    arguments.insert(arguments.end(), options.begin(), options.end());
    std::random_device random;
    for (const std::string& word : {std::string("-n"), std::to_string(num_processes), program,
                                    launcher.name, tcp() + "+15", std::to_string(random())}) {
      arguments.push_back(word);
    }
    if (!what.empty()) arguments.push_back(what);
    const auto outcome =
        testing::run_program(launcher.program, arguments, testing::mpi_environment(250));
    Job job{{}, outcome.out + outcome.err};
    std::istringstream text(outcome.out);
    for (std::string line; std::getline(text, line);) {
      const auto begins = [&](const std::string& word) { return line.starts_with(word); };
      if (std::ranges::any_of(words, begins)) job.lines.push_back(line);
    }
    return job;
  }
};

TEST_P(MpiGroupsTest, KeepTheirPromises) {
  const Job job = run(6, {"passed ", "failed"}, {});
  // All have run the same tests, and there are some.
  ASSERT_THAT(job.lines, SizeIs(6)) << job.all;
  EXPECT_THAT(job.lines, Each(AllOf(job.lines[0], StartsWith("passed "), Not("passed 0"))))
      << job.all;
}

// All say so if the launcher leaves them the time.
TEST_P(MpiGroupsTest, NameAProcessThatIsKilled) {
  const auto& options = GetParam().leave_others_alone;
  const Job job = run(3, {"told "}, options, "dies");
  if (!options.empty()) {
    ASSERT_THAT(job.lines, SizeIs(2)) << job.all;
  }
  EXPECT_THAT(job.lines, SizeIs(Le(2))) << job.all;
  EXPECT_THAT(job.lines, Each(HasSubstr("lost process 1 (")));
}

INSTANTIATE_TEST_SUITE_P(Launchers, MpiGroupsTest, ::testing::ValuesIn(testing::mpi_launchers()),
                         testing::launcher_name);

}  // namespace
}  // namespace tessera::comm

// Processes over MPI, started by its own launchers: mpi_process.cc is what they run.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "engine/sanitizers.h"
#include "tests/testing/mpi_launcher.h"
#include "tests/testing/program.h"

namespace tessera::comm {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::MpiLauncher;
using ::testing::Not;
using ::testing::SizeIs;
namespace fs = std::filesystem;

struct Job {
  int exit_code;
  std::vector<std::string> lines;  // sorted
  std::string err;
};

std::map<std::string, std::string> environment() {
  auto variables = testing::mpi_environment(200);
  // The order in which MPIs lock, and what they leave, is theirs.
  variables["TSAN_OPTIONS"] = "halt_on_error=1:detect_deadlocks=0";
  variables["ASAN_OPTIONS"] = "detect_leaks=0:intercept_tls_get_addr=0";
#if defined(TESSERA_TSAN) || defined(TESSERA_ASAN)
  variables["UCX_MEM_EVENTS"] = "no";  // UCX, under MPICH, and sanitizers both replace mmap()
#endif
  return variables;
}

Job run(const MpiLauncher& launcher, int num_processes, const std::vector<std::string>& words) {
  std::vector<std::string> arguments = launcher.options;
  for (const std::string& word : {std::string("-n"), std::to_string(num_processes),
                                  fs::absolute("tests/comm/mpi_process").string()}) {
    arguments.push_back(word);
  }
  arguments.insert(arguments.end(), words.begin(), words.end());
  const auto outcome = testing::run_program(launcher.program, arguments, environment());
  Job job{outcome.exit_code, {}, outcome.err};
  std::istringstream text(outcome.out);
  for (std::string line; std::getline(text, line);) job.lines.push_back(line);
  std::ranges::sort(job.lines);
  return job;
}

class MpiTransportTest : public ::testing::TestWithParam<MpiLauncher> {
 protected:
  Job run(int num_processes, const std::string& what, const std::string& option = "chunk=1000000") {
    return comm::run(GetParam(), num_processes, {what, "family=" + GetParam().name, option});
  }
};

// "0 of 2", ... of processes that keep their promises. The version that follows is left out.
std::vector<std::string> all_of(int num_processes) {
  std::vector<std::string> lines;
  for (int p = 0; p < num_processes; ++p)
    lines.push_back(fmt::format("{} of {}", p, num_processes));
  return lines;
}

std::vector<std::string> heads(std::vector<std::string> lines) {
  for (std::string& line : lines) line.resize(std::min(line.size(), line.find(',')));
  return lines;
}

TEST_P(MpiTransportTest, KeepsItsPromises) {
  for (int n = 1; n <= 4; ++n) {
    // With chunks of 1 MiB, of which the messages have four, or of the usual length.
    const Job job = run(n, "promises", n == 2 ? "chunk=1048576" : "chunk=1073741824");
    EXPECT_EQ(heads(job.lines), all_of(n)) << job.err;
    EXPECT_THAT(job.lines, Each(HasSubstr(", " + GetParam().version)));
    EXPECT_EQ(job.exit_code, 0) << job.err;
  }
}

TEST_P(MpiTransportTest, StartsOnceInAProcess) {
  const Job job = run(2, "twice");
  EXPECT_EQ(job.exit_code, 0) << job.err;
  ASSERT_THAT(job.lines, SizeIs(4)) << job.err;
  for (const std::size_t i : {0, 1}) {
    EXPECT_THAT(job.lines[i], HasSubstr("expected MPI not to be in use"));
    EXPECT_THAT(job.lines[i + 2], HasSubstr("expected MPI not to have ended in this process"));
  }
}

TEST_P(MpiTransportTest, SharesAnMpiThatTheProgramHasStarted) {
  const Job job = run(2, "shares");
  EXPECT_EQ(heads(job.lines), all_of(2)) << job.err;
  EXPECT_EQ(job.exit_code, 0) << job.err;
}

// The memory of a message that is on its way stays, and nobody waits for it. The launcher may end
// the other process before it says so, and say more itself.
TEST_P(MpiTransportTest, EndsWithMessagesOnTheirWay) {
  const Job job = run(2, "abandons");
  EXPECT_THAT(job.lines, Contains("ended, kept")) << job.err;
  EXPECT_THAT(job.lines, Not(Contains(HasSubstr("released")))) << job.err;
}

// What went wrong is said at once, though the other process waits for a message of this one. The
// launcher may say more.
TEST_P(MpiTransportTest, EndsByAnException) {
  const Job job = run(2, "fails");
  EXPECT_THAT(job.lines, Contains("the root cause")) << job.err;
  EXPECT_NE(job.exit_code, 0);
}

TEST_P(MpiTransportTest, WaitsForNobodyOnceItHasGivenUp) {
  const Job job = run(2, "gives_up");
  EXPECT_THAT(job.lines, Contains("ended alone")) << job.err;
  EXPECT_NE(job.exit_code, 0);
}

// Another MPI's launcher starts worlds of one process: whoever knows how many there should be sees
// that by num_processes().
TEST_P(MpiTransportTest, IsAloneUnderAnotherLauncher) {
  const bool is_open_mpi = GetParam().name == testing::open_mpi().name;
  const MpiLauncher& other = is_open_mpi ? testing::mpich() : testing::open_mpi();
  const Job job = comm::run(GetParam(), 2, {"promises", "family=" + other.name});
  EXPECT_EQ(heads(job.lines), std::vector<std::string>({"0 of 1", "0 of 1"})) << job.err;
  EXPECT_THAT(job.lines, Each(HasSubstr(", " + other.version)));
}

INSTANTIATE_TEST_SUITE_P(Launchers, MpiTransportTest, ::testing::ValuesIn(testing::mpi_launchers()),
                         testing::launcher_name);

}  // namespace
}  // namespace tessera::comm

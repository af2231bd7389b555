// A training on a terminal and in a pipe, as a person sees it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using engine::FileDescriptor;
using testing::Flags;
using testing::has;

const std::string kErase = "\r\x1b[K";

class Terminal : public testing::TinyTraining {
 protected:
  struct Seen {
    std::string text;
    int exit_code = -1;  ///< -1: it ended by a signal
  };

  /// Runs a training whose stdout and stderr are a terminal; sends SIGINT once `interrupt_at` is
  /// seen, if that is not empty, after a Ctrl-S if `stops`.
  Seen run_on_terminal(const Flags& more, const std::string& interrupt_at = "",
                       const char* no_color = nullptr, bool stops = false) const {
    const engine::FileDescriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    EXPECT_EQ(::grantpt(terminal.get()), 0);
    EXPECT_EQ(::unlockpt(terminal.get()), 0);
    const std::string program = std::filesystem::absolute(testing::kTransformer).string();
    std::vector<std::string> words = {program};
    for (const auto& [name, value] : with(more)) words.push_back("--" + name + "=" + value);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    engine::FileDescriptor side(::open(::ptsname(terminal.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("TERM", "xterm", 1);
      if (no_color != nullptr) ::setenv("NO_COLOR", no_color, 1);
      ::dup2(side.get(), STDOUT_FILENO);
      ::dup2(side.get(), STDERR_FILENO);
      ::execv(program.c_str(), argv.data());
      ::_exit(127);
    }
    side.close();
    Seen seen;
    bool interrupted = interrupt_at.empty();
    std::array<char, 1 << 12> buffer{};
    for (;;) {  // until the last descriptor of the other side is closed
      const ssize_t n = ::read(terminal.get(), buffer.data(), buffer.size());
      if (n <= 0) break;
      seen.text.append(buffer.data(), static_cast<std::size_t>(n));
      if (interrupted || seen.text.find(interrupt_at) == std::string::npos) continue;
      interrupted = true;
      if (stops) {
        EXPECT_EQ(::write(terminal.get(), "\x13", 1), 1);
      }
      ::kill(child, SIGINT);
    }
    int status = 0;
    if (::waitpid(child, &status, 0) == child && WIFEXITED(status)) {
      seen.exit_code = WEXITSTATUS(status);
    }
    return seen;
  }
};

const std::vector<std::string> kSummary = {
    "summary", "  steps   ", "  step    ", "  time    compute ", "  speed   ", "  memory  "};

TEST_F(Terminal, ShowsAStatusLineThatIsGoneAtTheEnd) {
  const Seen seen = run_on_terminal({{"train.steps", "30"}, {"log.every", "10"}});
  EXPECT_EQ(seen.exit_code, 0) << seen.text;
  EXPECT_TRUE(
      has(seen.text, {kErase + "[", " % step ", "| ETA ", "\x1b[1mstep    10/30\x1b[0m | loss "}));
  // What is on the line of the status is erased before anything else is written.
  const std::size_t last = seen.text.rfind("| ETA ");
  const std::size_t status = seen.text.rfind(kErase);
  EXPECT_LT(status, seen.text.find("summary"));
  EXPECT_LT(last, seen.text.find("summary"));
  for (const std::string& part : kSummary) EXPECT_TRUE(has(seen.text, {part}));
}

// Of a terminal that does not say how wide it is, and so has 80 columns.
TEST_F(Terminal, LinesOfStepsFitIt) {
  const Seen seen = run_on_terminal({{"train.steps", "700"}, {"log.every", "350"}}, "", "1");
  EXPECT_EQ(seen.exit_code, 0) << seen.text;
  std::size_t num_steps = 0;
  for (std::size_t at = seen.text.find("step "); at != std::string::npos;
       at = seen.text.find("step ", at + 1)) {
    const std::string line = seen.text.substr(at, seen.text.find_first_of("\r\n", at) - at);
    const std::size_t eta = line.find("| ETA ");
    if (eta == std::string::npos || line.find("| loss ") > eta) continue;  // the status line
    EXPECT_LT(line.size(), 80u) << line;
    EXPECT_TRUE(has(line, {" ms | ", " tokens/s | ETA "})) << line;
    ++num_steps;
  }
  EXPECT_GE(num_steps, 3u) << seen.text;
}

TEST_F(Terminal, NoColorTakesColoursAway) {
  const Seen seen = run_on_terminal({{"train.steps", "30"}, {"log.every", "10"}}, "", "1");
  EXPECT_EQ(seen.exit_code, 0);
  EXPECT_TRUE(has(seen.text, {kErase + "["}));
  EXPECT_EQ(seen.text.find("\x1b[1m"), std::string::npos) << seen.text;
  EXPECT_EQ(seen.text.find("\x1b[0m"), std::string::npos) << seen.text;
}

TEST_F(Terminal, AnInterruptEndsWithTheSummary) {
  // Few lines: the message is for a terminal that has room for it.
  const Seen seen =
      run_on_terminal({{"train.steps", "1000000"}, {"log.every", "100000"}}, "step     1/1000000");
  EXPECT_EQ(seen.exit_code, 0) << seen.text;
  EXPECT_TRUE(has(seen.text, {"SIGINT: ending soon", "stopped by SIGINT after step "}));
  for (const std::string& part : kSummary) EXPECT_TRUE(has(seen.text, {part}));
  // The message does not hang behind a status line.
  EXPECT_TRUE(has(seen.text, {kErase + "SIGINT: ending soon"}));
}

// Lines and the error that they were lost find no room.
TEST_F(Terminal, AnInterruptEndsARunWhoseTerminalWasStopped) {
  const Seen seen = run_on_terminal(
      {{"train.steps", "1000000"}, {"log.every", "1"}, {"checkpoint.every", "1000000"}},
      "step     1/1000000", nullptr, true);
  EXPECT_EQ(seen.exit_code, 1) << seen.text;
  EXPECT_EQ(seen.text.find("stopped by"), std::string::npos) << seen.text;
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/checkpoints/latest"));
}

TEST_F(Terminal, NoStatusLineIsLeftAfterTheLastStep) {
  const Seen stopped = run_on_terminal({{"train.steps", "1000"},
                                        {"log.every", "10"},
                                        {"checkpoint.every", "1000"},
                                        {"train.max_minutes", "1e-9"}});
  EXPECT_EQ(stopped.exit_code, 0) << stopped.text;
  const std::size_t saved = stopped.text.find("checkpoint of step 1 in ");
  ASSERT_NE(saved, std::string::npos) << stopped.text;
  EXPECT_EQ(stopped.text.find(" % step ", saved), std::string::npos) << stopped.text;
}

TEST_F(Terminal, NoStatusLineComesAfterASignal) {
  // Steps of about half a second, of each of which there is a line: one comes after the signal.
  const Seen seen = run_on_terminal({{"model.dim", "64"},
                                     {"train.accum", "300"},
                                     {"train.steps", "10000"},
                                     {"log.every", "1"},
                                     {"checkpoint.every", "10000"}},
                                    "step     1/10000");
  EXPECT_EQ(seen.exit_code, 0) << seen.text;
  const std::size_t signal = seen.text.find("SIGINT: ending soon");
  ASSERT_NE(signal, std::string::npos) << seen.text;
  EXPECT_NE(seen.text.find("/10000\x1b[0m | loss ", signal), std::string::npos) << seen.text;
  EXPECT_EQ(seen.text.find(" % step ", signal), std::string::npos) << seen.text;
  const std::size_t saved = seen.text.find("checkpoint of step ");
  ASSERT_NE(saved, std::string::npos) << seen.text;
  const std::string step = seen.text.substr(saved, seen.text.find(" in ", saved) - saved);
  EXPECT_TRUE(
      has(seen.text, {"no model saved (save.final is empty); the " + step + " has it\r\n"}));
}

TEST_F(Terminal, APipeGetsLinesAlone) {
  const testing::Outcome outcome =
      testing::run_program(testing::kTransformer,
                           with({{"train.steps", "30"}, {"log.every", "10"}}), {{"TERM", "xterm"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out.find('\x1b'), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find('\r'), std::string::npos) << outcome.out;
  EXPECT_TRUE(has(outcome.out, {"step    10/30 | loss "}));
  for (const std::string& part : kSummary) EXPECT_TRUE(has(outcome.out, {part}));
}

}  // namespace
}  // namespace tessera

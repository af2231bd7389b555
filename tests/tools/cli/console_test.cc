// What a terminal is told, and what a pipe is.
#include "tools/cli/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "engine/io/file.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using testing::has;
using testing::TempFolder;

/// A terminal of 40 columns, and what was written to it.
class ConsoleTest : public ::testing::Test {
 protected:
  ConsoleTest() {
    ::setenv("TERM", "xterm", 1);
    ::unsetenv("NO_COLOR");
    terminal_ = engine::FileDescriptor(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    EXPECT_EQ(::grantpt(terminal_.get()), 0);
    EXPECT_EQ(::unlockpt(terminal_.get()), 0);
    side_ =
        engine::FileDescriptor(::open(::ptsname(terminal_.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
    const winsize size{.ws_row = 24, .ws_col = 40, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(::ioctl(side_.get(), TIOCSWINSZ, &size), 0);
    ::alarm(30);  // ends a test that hangs
  }
  ~ConsoleTest() override { ::alarm(0); }

  /// What was written: as much as `expected`, which may come in pieces, and what is there beside
  /// it.
  std::string read_like(const std::string& expected) const {
    std::string text;
    while (text.size() < expected.size()) text += read();
    pollfd file{.fd = terminal_.get(), .events = POLLIN, .revents = 0};
    while (::poll(&file, 1, 20) == 1) text += read();
    return text;
  }
  void expect(Console& console, const std::string& expected) const {
    console.flush(nullptr);
    EXPECT_EQ(read_like(expected), expected);
  }
  std::string read() const {
    std::array<char, 1 << 16> buffer{};
    const ssize_t n = ::read(terminal_.get(), buffer.data(), buffer.size());
    return n > 0 ? std::string(buffer.data(), static_cast<std::size_t>(n)) : "";
  }
  /// As long as a status line stays at least.
  static void pass_time() { std::this_thread::sleep_for(std::chrono::milliseconds(150)); }

  engine::FileDescriptor terminal_, side_;
};

const std::string kErase = "\r\x1b[K";

TEST_F(ConsoleTest, AStatusLineIsWrittenInItsPlace) {
  Console console(side_.get());
  ASSERT_TRUE(console.shows_status());
  console.status("one");
  console.status("too soon after it");
  console.say("a line");
  const std::string first = kErase + "one" + kErase + "a line\r\none";
  EXPECT_EQ(read_like(first), first);
  pass_time();
  console.status("two");
  expect(console, kErase + "two" + kErase);
  console.say("after");
  expect(console, "after\r\n");
}

TEST_F(ConsoleTest, AStatusLineNeverTakesTwo) {
  Console console(side_.get());
  console.status(std::string(500, 'x'));
  expect(console, kErase + std::string(39, 'x') + kErase);
}

TEST_F(ConsoleTest, AStatusLineIsCutBetweenFields) {
  Console console(side_.get());
  const std::string fits = std::string(30, 'x') + " | 34.7";  // and two more
  for (const std::string rest : {"", " | 4096 tokens/s", " | 9 and so on | more"}) {
    console.status(fits + rest);
    expect(console, kErase + fits + kErase);
    pass_time();
  }
  console.status(fits + " ms");  // of 40 columns one too many
  expect(console, kErase + std::string(30, 'x') + kErase);
}

TEST_F(ConsoleTest, TheStatusLineGoesWithTheConsole) {
  auto console = std::make_unique<Console>(side_.get());
  console->status("one");
  pass_time();
  console.reset();
  const std::string expected = kErase + "one" + kErase;
  EXPECT_EQ(read_like(expected), expected);
}

TEST_F(ConsoleTest, ATerminalThatIsNotReadIsSpared) {
  Console console(side_.get());
  console.say(std::string(1 << 20, 'x'));  // more than it takes
  for (int i = 0; i < 3; ++i) {
    pass_time();
    console.status("never shown");
  }
  const std::string line = std::string(1 << 20, 'x') + "\r\n";
  EXPECT_EQ(read_like(line), line);
  console.flush(nullptr);
}

TEST_F(ConsoleTest, ColoursTheBeginningOfALine) {
  Console console(side_.get());
  console.say("step 1 | loss 2", Console::Style::kStrong);
  console.say("trouble", Console::Style::kWarning);
  console.say("plain");
  expect(console, "\x1b[1mstep 1\x1b[0m | loss 2\r\n\x1b[33mtrouble\x1b[0m\r\nplain\r\n");
}

TEST_F(ConsoleTest, NoColorLeavesTheStatusLine) {
  ::setenv("NO_COLOR", "1", 1);
  Console console(side_.get());
  console.say("step 1 | loss 2", Console::Style::kStrong);
  expect(console, "step 1 | loss 2\r\n");
  console.status("one");
  expect(console, kErase + "one" + kErase);
}

TEST_F(ConsoleTest, AnEmptyNoColorIsNone) {
  ::setenv("NO_COLOR", "", 1);
  Console console(side_.get());
  console.say("a", Console::Style::kStrong);
  expect(console, "\x1b[1ma\x1b[0m\r\n");
}

TEST_F(ConsoleTest, ADumbTerminalAndAFileGetLinesAlone) {
  const TempFolder folder;
  const engine::FileDescriptor file(
      ::open(folder.write("out", "").c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  ::setenv("TERM", "dumb", 1);
  Console dumb(side_.get());
  ::setenv("TERM", "xterm", 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  Console launched(side_.get());
  ::unsetenv("OMPI_COMM_WORLD_SIZE");
  Console plain(file.get());
  for (Console* console : {&dumb, &launched, &plain}) {
    EXPECT_FALSE(console->shows_status());
    console->status("nothing");
    console->say("a line", Console::Style::kStrong);
    console->flush(nullptr);
  }
  EXPECT_EQ(read_like("a line\r\na line\r\n"), "a line\r\na line\r\n");
  EXPECT_EQ(folder.read("out"), "a line\n");
}

TEST(ProgressBar, FillsFromTheLeft) {
  EXPECT_EQ(progress_bar(0, 12), "[>         ]");
  EXPECT_EQ(progress_bar(0.5, 12), "[=====>    ]");
  EXPECT_EQ(progress_bar(0.999, 12), "[=========>]");
  EXPECT_EQ(progress_bar(1, 12), "[==========]");
  EXPECT_EQ(progress_bar(7, 4), "[==]");
  EXPECT_EQ(progress_bar(0.5, 1), "[]");
}

}  // namespace
}  // namespace tessera::tools

// What is said on stderr to somebody who reads, who pauses, and who has gone.
#include "tools/cli/error_output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>

#include "engine/io/file.h"

namespace tessera::tools {
namespace {

using engine::FileDescriptor;
using std::chrono::milliseconds;

/// stderr goes to `fd` while it lives. A test that hangs is ended.
class StderrTo {
 public:
  explicit StderrTo(const FileDescriptor& fd) : saved_(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) {
    ::dup2(fd.get(), STDERR_FILENO);
    ::alarm(60);
  }
  ~StderrTo() {
    ::alarm(0);
    ::dup2(saved_.get(), STDERR_FILENO);
  }
  StderrTo(const StderrTo&) = delete;
  StderrTo& operator=(const StderrTo&) = delete;

 private:
  const FileDescriptor saved_;
};

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    out = FileDescriptor(ends[0]);
    in = FileDescriptor(ends[1]);
  }
  /// All that comes until nobody can write any more.
  std::string read_all() {
    in.close();
    std::string text;
    std::array<char, 1 << 12> buffer{};
    for (ssize_t n = 0; (n = ::read(out.get(), buffer.data(), buffer.size())) > 0;) {
      text.append(buffer.data(), static_cast<std::size_t>(n));
    }
    return text;
  }
  FileDescriptor out, in;
};

TEST(ErrorOutput, PartsOfAnyLengthComeInOrder) {
  for (const milliseconds patience : {kNoHurry, milliseconds(0)}) {
    Pipe pipe;
    std::string text;
    for (int i = 0; text.size() < 10'000; ++i) text += std::to_string(i);
    {
      const StderrTo there(pipe.in);
      write_to_stderr({"error: ", text, "", "\n"}, patience);
      write_to_stderr({}, patience);
    }
    EXPECT_EQ(pipe.read_all(), "error: " + text + "\n");
  }
}

TEST(ErrorOutput, AFileIsWrittenWhereItStands) {
  std::string name = std::string(::getenv("TEST_TMPDIR")) + "/error-XXXXXX";
  const FileDescriptor file(::mkstemp(name.data()));
  ASSERT_EQ(::write(file.get(), "before\n", 7), 7);
  {
    const StderrTo there(file);
    write_to_stderr({"error\n"}, kErrorPatience);
  }
  std::array<char, 100> text{};
  ASSERT_EQ(::pread(file.get(), text.data(), text.size(), 0), 13);
  EXPECT_STREQ(text.data(), "before\nerror\n");
}

TEST(ErrorOutput, APipeThatNobodyReadsHoldsUpNobody) {
  const Pipe pipe;
  ASSERT_GT(::fcntl(pipe.in.get(), F_SETPIPE_SZ, 1 << 12), 0);
  const StderrTo there(pipe.in);
  const std::string much(1 << 20, 'x');
  write_to_stderr({much}, milliseconds(0));
  write_to_stderr({much}, milliseconds(20));
  EXPECT_EQ(::fcntl(STDERR_FILENO, F_GETFL) & O_NONBLOCK, 0);  // others share it
}

TEST(ErrorOutput, AReaderThatComesInTimeGetsAll) {
  Pipe pipe;
  ASSERT_GT(::fcntl(pipe.in.get(), F_SETPIPE_SZ, 1 << 12), 0);
  const std::string much(1 << 16, 'x');
  std::string got;
  std::jthread reader;
  {
    const StderrTo there(pipe.in);
    write_to_stderr({much}, milliseconds(0));  // full
    reader = std::jthread([&] { got = pipe.read_all(); });
    write_to_stderr({"the end\n"}, kNoHurry);
  }
  reader.join();
  EXPECT_TRUE(got.ends_with("the end\n")) << got.size();
}

TEST(ErrorOutput, AReaderWhoHasGoneIsNoSignalToWaitFor) {
  Pipe pipe;
  pipe.out.close();
  const auto before = ::signal(SIGPIPE, SIG_IGN);
  const StderrTo there(pipe.in);
  write_to_stderr({"error\n"}, kNoHurry);
  ::signal(SIGPIPE, before);
}

// Ctrl-S, or a terminal whose window does not answer.
TEST(ErrorOutput, ATerminalThatWasStoppedHoldsUpNobody) {
  const FileDescriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_EQ(::grantpt(terminal.get()), 0);
  ASSERT_EQ(::unlockpt(terminal.get()), 0);
  const FileDescriptor side(::open(::ptsname(terminal.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  const StderrTo there(side);
  ASSERT_EQ(::tcflow(side.get(), TCOOFF), 0);
  write_to_stderr({"error\n"}, milliseconds(20));
  ASSERT_EQ(::tcflow(side.get(), TCOON), 0);
  write_to_stderr({std::string(1 << 20, 'x')}, milliseconds(20));  // and nobody reads
}

}  // namespace
}  // namespace tessera::tools

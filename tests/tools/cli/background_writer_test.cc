// Text that goes to readers that pause, that leave, and to systems that interrupt: who waits for
// whom, and how long.
#include "tools/cli/background_writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using std::chrono::milliseconds;
using testing::below;
using testing::error_of;
using testing::FaultHere;
using testing::has;
using testing::TempFolder;

constexpr std::size_t kMore = 200'000;  // than a pipe takes

class BackgroundWriterTest : public ::testing::Test {
 protected:
  BackgroundWriterTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    out_ = engine::FileDescriptor(ends[0]);
    in_ = engine::FileDescriptor(ends[1]);
    std::signal(SIGPIPE, SIG_IGN);
    ::alarm(30);  // ends a test that hangs
  }
  ~BackgroundWriterTest() override { ::alarm(0); }

  /// Reads `nbytes` from the pipe, or what there is before its end; how many.
  std::size_t read(std::size_t nbytes) const {
    std::string buffer(1 << 16, '\0');
    std::size_t num_read = 0;
    while (num_read < nbytes) {
      const ssize_t n =
          ::read(out_.get(), buffer.data(), std::min(buffer.size(), nbytes - num_read));
      if (n <= 0) break;
      num_read += static_cast<std::size_t>(n);
    }
    return num_read;
  }

  engine::FileDescriptor out_, in_;
};

TEST_F(BackgroundWriterTest, FlushWaitsForTheLastByte) {
  BackgroundWriter writer(in_.get(), "pipe");
  writer.write(std::string(kMore, 'a'));
  auto flushed = std::async(std::launch::async, [&] { writer.flush(); });
  EXPECT_EQ(flushed.wait_for(milliseconds(200)), std::future_status::timeout);
  EXPECT_EQ(read(kMore), kMore);
  flushed.get();
}

TEST_F(BackgroundWriterTest, ATextAloneMayBeOfAnySize) {
  BackgroundWriter writer(in_.get(), "pipe", /*max_queued_nbytes=*/10);
  writer.write(std::string(kMore, 'a'));
  EXPECT_FALSE(writer.error());
  writer.write("a");
  ASSERT_TRUE(writer.error());
  EXPECT_EQ(read(kMore), kMore);
}

TEST_F(BackgroundWriterTest, SixteenMebibytesWaitAndNoMore) {
  constexpr std::size_t kMiB = 1 << 20;
  BackgroundWriter writer(in_.get(), "pipe");
  for (int i = 0; i < 16; ++i) writer.write(std::string(kMiB, 'a'));
  EXPECT_FALSE(writer.error());
  writer.write("a");  // nobody waits: it is lost
  ASSERT_TRUE(writer.error());
  EXPECT_EQ(writer.error()->value(), ENOBUFS);
  EXPECT_EQ(read(16 * kMiB), 16 * kMiB);
  EXPECT_THROW(writer.flush(), IoError);
}

TEST_F(BackgroundWriterTest, RoomComesBack) {
  BackgroundWriter writer(in_.get(), "pipe");
  for (int i = 0; i < 100; ++i) {
    writer.write(std::string(std::size_t{1} << 20, 'a'));
    EXPECT_EQ(read(std::size_t{1} << 20), std::size_t{1} << 20);
  }
  writer.flush();
}

TEST_F(BackgroundWriterTest, AHurriedFlushGivesUpWithoutProgress) {
  BackgroundWriter writer(in_.get(), "pipe");
  writer.write(std::string(kMore, 'a'));
  EXPECT_TRUE(has(error_of<IoError>([&] { writer.flush([] { return true; }); }),
                  {"[writer]", "timed out", "pipe"}));
}

TEST_F(BackgroundWriterTest, AFlushThatWaitsAlreadyMayBeHurried) {
  BackgroundWriter writer(in_.get(), "pipe");
  writer.write(std::string(kMore, 'a'));
  int num_asked = 0;
  EXPECT_TRUE(has(error_of<IoError>([&] { writer.flush([&] { return ++num_asked > 100; }); }),
                  {"[writer]", "timed out", "pipe"}));
  EXPECT_GT(num_asked, 100);
}

TEST_F(BackgroundWriterTest, ATerminalThatNobodyReadsHoldsUpNobody) {
  const engine::FileDescriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal.is_open());
  ASSERT_EQ(::grantpt(terminal.get()), 0);
  ASSERT_EQ(::unlockpt(terminal.get()), 0);
  const engine::FileDescriptor side(
      ::open(::ptsname(terminal.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(side.is_open());
  auto writer = std::make_unique<BackgroundWriter>(side.get(), "terminal");
  for (int i = 0; i < 10'000; ++i) writer->write("a line of a length that divides nothing\n");
  writer.reset();  // or the test hangs
  EXPECT_EQ(::fcntl(side.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(BackgroundWriterTest, ClosingWaitsForAReaderThatGoesOn) {
  auto writer = std::make_unique<BackgroundWriter>(in_.get(), "pipe");
  writer->write(std::string(kMore, 'a'));
  std::jthread closing([&] {
    writer.reset();
    in_.close();
  });
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(read(kMore), kMore);
}

TEST_F(BackgroundWriterTest, ClosingGivesUpOnAReaderThatDoesNot) {
  auto writer = std::make_unique<BackgroundWriter>(in_.get(), "pipe");
  writer->write(std::string(kMore, 'a'));
  writer.reset();
  in_.close();
  const std::size_t num_read = read(kMore);
  EXPECT_GT(num_read, 0u);
  EXPECT_LT(num_read, kMore);
}

TEST_F(BackgroundWriterTest, AReaderThatLeavesWhileThePipeIsFullIsAnError) {
  BackgroundWriter writer(in_.get(), "pipe");
  writer.write(std::string(kMore, 'a'));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(writer.error());
  out_.close();
  EXPECT_TRUE(has(error_of<IoError>([&] { writer.flush(); }), {"[writer]", "Broken pipe", "pipe"}));
  ASSERT_TRUE(writer.error());
  EXPECT_EQ(writer.error()->value(), EPIPE);
  writer.write("later text is lost");
  EXPECT_THROW(writer.flush(), IoError);
}

TEST_F(BackgroundWriterTest, WritesAgainWhatWasInterruptedOrFoundNoRoom) {
  for (const int error : {EINTR, EAGAIN}) {
    const TempFolder folder;
    const engine::FileDescriptor file(
        ::open((folder / "a").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const FaultHere fault({"write", below(folder, "a"), 1, std::to_string(error)});
    BackgroundWriter writer(file.get(), "a");
    writer.write("text\n");
    writer.flush();
    EXPECT_EQ(folder.read("a"), "text\n");
  }
}

}  // namespace
}  // namespace tessera::tools

// Output that appears whole or not at all: what is refused early, what is said, what is left
// behind.
#include "tools/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using engine::IoError;
using testing::below;
using testing::error_of;
using testing::FaultHere;
using testing::has;
using testing::TempFolder;

void write(AtomicFile& file, std::string_view text) { file.write(std::as_bytes(std::span(text))); }

void die() { ::kill(::getpid(), SIGKILL); }

/// Runs `fn`, which must die(), in another process.
void in_process_that_dies(const std::function<void()>& fn) {
  const pid_t child = ::fork();
  if (child == 0) {
    fn();
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
}

/// What replacing `path` says, with a fault in it.
std::string error_with(const testing::Fault& fault, const std::string& path) {
  return error_of<IoError>([&] {
    const FaultHere here(fault);
    AtomicFile file(path);
    write(file, "new");
    file.commit();
  });
}

TEST(AtomicFile, SaysTheReasonOfTheCallThatFailed) {
  for (const auto& [call, part, reason] :
       std::vector<std::array<std::string, 3>>{{"write", "/a.tmp", "Input/output error"},
                                               {"fsync", "/a.tmp", "Input/output error"},
                                               {"rename", "/a.tmp", "Input/output error"}}) {
    const TempFolder folder;
    const std::string path = folder.write("a", "old");
    errno = 0;
    EXPECT_TRUE(has(error_with({call, part, 1, std::to_string(EIO)}, path), {path, reason}))
        << call;
    EXPECT_EQ(folder.read("a"), "old") << call;
    EXPECT_EQ(folder.num_entries(), 1) << call;
  }
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  EXPECT_TRUE(has(error_with({"close", "/a.tmp", 1, std::to_string(EDQUOT)}, path),
                  {path, "Disk quota exceeded"}));
  EXPECT_EQ(folder.read("a"), "old");
  // The second is the folder's: the new file is there by then.
  errno = 0;
  EXPECT_TRUE(
      has(error_with({"fsync", fs::path(folder.path()).filename().string(), 2, std::to_string(EIO)},
                     path),
          {path, "folder", "Input/output error"}));
  EXPECT_EQ(folder.read("a"), "new");
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(AtomicFile, RemovesWhatADeadProcessLeft) {
  const TempFolder folder;
  in_process_that_dies([&] {
    AtomicFile a(folder / "a");
    AtomicFile again(folder / "a");
    AtomicFile other(folder / "ab");
    die();
  });
  folder.write("a.tmp-1-", "no process and number");
  folder.write("a.tmp-1-x", "");
  folder.write("a.tmp-1", "");
  folder.write("a.tmp-1-2-3", "");
  EXPECT_EQ(folder.num_entries(), 4 + 3);
  AtomicFile file(folder / "a");
  write(file, "new");
  EXPECT_EQ(folder.num_entries(), 4 + 1 + 1);  // and the one in hand
  file.commit();
  EXPECT_EQ(folder.num_entries(), 4 + 1 + 1);
  EXPECT_EQ(folder.read("a"), "new");
}

TEST(AtomicFile, LeavesTheTemporaryOfALiveSaverAlone) {
  const TempFolder folder;
  AtomicFile first(folder / "a");
  write(first, "first");
  AtomicFile second(folder / "a");
  EXPECT_EQ(folder.num_entries(), 2);
  write(second, "second");
  first.flush();  // closes the file it wrote; the name is yet to come
  AtomicFile third(folder / "a");
  EXPECT_EQ(folder.num_entries(), 3);
  second.commit();
  EXPECT_EQ(folder.read("a"), "second");
  first.replace();
  EXPECT_EQ(folder.read("a"), "first");
}

TEST(AtomicFile, WithoutLocksNothingIsRemoved) {
  const TempFolder folder;
  in_process_that_dies([&] {
    AtomicFile a(folder / "a");
    die();
  });
  EXPECT_EQ(folder.num_entries(), 1);
  {
    const FaultHere fault({"flock", below(folder, "a.tmp"), 1, std::to_string(ENOLCK)});
    AtomicFile(folder / "a").commit();
  }
  EXPECT_EQ(folder.num_entries(), 2);
  AtomicFile(folder / "a").commit();
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(AtomicFile, IsRefusedAtOnceWhereItCouldNotTakeItsPlace) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  const auto refusal = [&] { return error_of<IoError>([&] { AtomicFile file(path); }); };
  {
    const FaultHere fault({"rmdir", below(folder, "a"), 1, std::to_string(EPERM)});
    EXPECT_TRUE(has(refusal(), {"can be replaced", "Operation not permitted", path}));
  }
  // As it is, where this user and file system can have an immutable file.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  int before = 0;
  const bool has_flags = ::ioctl(file.get(), FS_IOC_GETFLAGS, &before) == 0;
  for (const int flag : {FS_IMMUTABLE_FL, FS_APPEND_FL}) {
    const int with_flag = before | flag;
    if (!has_flags || ::ioctl(file.get(), FS_IOC_SETFLAGS, &with_flag) != 0) {
      RecordProperty("immutable", "not here");
      continue;
    }
    const std::string error = refusal();
    ASSERT_EQ(::ioctl(file.get(), FS_IOC_SETFLAGS, &before), 0);
    EXPECT_TRUE(has(error, {"can be replaced", "Operation not permitted", path}));
  }
  EXPECT_EQ(folder.read("a"), "old");
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(AtomicFile, IsRefusedAtOnceInAStickyFolderOfOthers) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to give a file to another user";
  constexpr uid_t kOwner = 12345, kOther = 23456;
  if (::chown(path.c_str(), kOwner, kOwner) != 0) GTEST_SKIP() << "a sandbox with one user";
  ASSERT_EQ(::chmod(folder.path().c_str(), 01777), 0);
  const std::string result = folder.write("b", "");
  ASSERT_EQ(::chmod(result.c_str(), 0666), 0);
  const FileDescriptor out(::open(result.c_str(), O_WRONLY | O_CLOEXEC));
  const pid_t child = ::fork();
  if (child == 0) {
    std::string said = "nothing";
    // From here, as the folders above may be closed to that user.
    if (::chdir(folder.path().c_str()) != 0 || ::setuid(kOther) != 0) ::_exit(1);
    try {
      AtomicFile file("a");
    } catch (const IoError& error) {
      said = error.what();
    }
    write_all(out, result, std::as_bytes(std::span(said)));
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(has(folder.read("b"), {"can be replaced", "Operation not permitted", "(a)"}));
}

}  // namespace
}  // namespace tessera::tools

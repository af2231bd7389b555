// Output that appears whole or not at all: what is refused early, what is said, what is left
// behind.
#include "engine/io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/temp_folder.h"

namespace tessera::engine {
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

TEST(AtomicFile, GoesOnWhereNothingIsWrong) {
  for (testing::Fault fault : std::vector<testing::Fault>{
           {"write", "/a.tmp", 1, std::to_string(EINTR)},
           {"close", "/a.tmp", 1, std::to_string(EINTR)},  // closes all the same
           {"fsync", "", 2, std::to_string(EINVAL)},       // a folder that needs no flush
       }) {
    const TempFolder folder;
    fault.part.insert(0, fs::path(folder.path()).filename().string());
    const FaultHere here(fault);
    AtomicFile file(folder / "a");
    EXPECT_NO_THROW(write(file, "new")) << fault.calls;
    EXPECT_NO_THROW(file.commit()) << fault.calls;
    EXPECT_EQ(folder.read("a"), "new") << fault.calls;
  }
}

// Savers of one file in each other's way
// ------------------------------------------------------------------------------------------------

/// Replaces "a" in another thread, which pauses before the first `call` of its temporary file, if
/// it has one by then, or of a file left behind.
class PausedSaver {
 public:
  PausedSaver(const TempFolder& folder, const std::string& call)
      : fault_({call, below(folder, "a.tmp"), 1, pause_ / "here"}),
        saved_(std::async(std::launch::async, [&folder] {
          AtomicFile file(folder / "a");
          write(file, "paused");
          file.commit();
        })) {
    while (!fs::exists(pause_ / "here")) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  /// Throws what the saver does.
  void go_on() {
    fs::remove(pause_ / "here");
    saved_.get();
  }

 private:
  const TempFolder pause_;
  const FaultHere fault_;
  std::future<void> saved_;
};

std::string only_file(const TempFolder& folder) {
  EXPECT_EQ(folder.num_entries(), 1);
  return fs::directory_iterator(folder.path())->path().string();
}

TEST(AtomicFile, LeavesATemporaryAloneWhoseNameIsInUseAgain) {
  const TempFolder folder;
  in_process_that_dies([&] {
    AtomicFile a(folder / "a");
    die();
  });
  const std::string leftover = only_file(folder);
  PausedSaver saver(folder, "flock");
  fs::rename(leftover, folder / "b");
  folder.write(fs::path(leftover).filename().string(), "in use again");
  saver.go_on();
  EXPECT_TRUE(fs::exists(leftover));
  EXPECT_TRUE(fs::exists(folder / "b"));
}

TEST(AtomicFile, TakesAnotherTemporaryWhereItsOwnWasRemovedBeforeItsLock) {
  const TempFolder folder;
  PausedSaver saver(folder, "flock");
  fs::remove(only_file(folder));
  EXPECT_NO_THROW(saver.go_on());
  EXPECT_EQ(folder.read("a"), "paused");
}

TEST(AtomicFile, KeepsItsTemporaryLockedUntilItHasItsName) {
  const TempFolder folder;
  PausedSaver saver(folder, "rename");
  {
    const AtomicFile other(folder / "a");
    EXPECT_EQ(folder.num_entries(), 2);
  }
  EXPECT_NO_THROW(saver.go_on());
  EXPECT_EQ(folder.read("a"), "paused");
}

// Refused early
// ------------------------------------------------------------------------------------------------

TEST(AtomicFile, IsRefusedAtOnceWhereItCouldNotTakeItsPlace) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  const auto refusal = [&] { return error_of<IoError>([&] { AtomicFile file(path); }); };
  {
    const FaultHere fault({"rmdir", below(folder, "a"), 1, std::to_string(EPERM)});
    EXPECT_TRUE(has(refusal(), {"can be replaced", "Operation not permitted", path}));
  }
  // As it is, where this user and file system have such attributes.
  const auto refused_with = [&](const std::string& what, int flag) {
    const FileDescriptor file(::open(what.c_str(), O_RDONLY | O_CLOEXEC));
    int before = 0;
    if (::ioctl(file.get(), FS_IOC_GETFLAGS, &before) != 0) return;
    const int with_flag = before | flag;
    if (::ioctl(file.get(), FS_IOC_SETFLAGS, &with_flag) != 0) return;
    const std::string error = refusal();
    ASSERT_EQ(::ioctl(file.get(), FS_IOC_SETFLAGS, &before), 0);
    EXPECT_TRUE(has(error, {"can be replaced", "Operation not permitted", path})) << what;
  };
  refused_with(path, FS_IMMUTABLE_FL);
  refused_with(path, FS_APPEND_FL);
  EXPECT_EQ(folder.read("a"), "old");
  ASSERT_EQ(::unlink(path.c_str()), 0);
  // Here a new file could be made, but neither renamed nor removed.
  refused_with(folder.path(), FS_APPEND_FL);
  EXPECT_EQ(folder.num_entries(), 0);
}

/// What an AtomicFile "a" in `folder` says in a process of its own, after prepare(): "" if nothing.
/// Nothing at all where prepare() cannot.
std::optional<std::string> refusal_in_process(const TempFolder& folder, bool (*prepare)()) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const FileDescriptor in(ends[0]);
  FileDescriptor out(ends[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    // From here, as the folders above may be closed to another user.
    if (::chdir(folder.path().c_str()) != 0 || !prepare()) ::_exit(1);
    std::string said;
    try {
      AtomicFile file("a");
    } catch (const IoError& error) {
      said = error.what();
    }
    write_all(out, "pipe", std::as_bytes(std::span(said)));
    ::_exit(0);
  }
  out.close();
  char text[1000];
  const ssize_t n = ::read(in.get(), text, sizeof(text));
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (status != 0 || n < 0) return std::nullopt;
  return std::string(text, static_cast<std::size_t>(n));
}

TEST(AtomicFile, IsRefusedAtOnceInAStickyFolderOfOthers) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  constexpr uid_t kOwner = 12345;
  if (::chown(path.c_str(), kOwner, kOwner) != 0) {  // not root: what the system would say
    const FaultHere fault({"rmdir", below(folder, "a"), 1, std::to_string(EPERM)});
    EXPECT_TRUE(has(error_of<IoError>([&] { AtomicFile file(path); }),
                    {"can be replaced", "Operation not permitted", path}));
    return;
  }
  ASSERT_EQ(::chmod(folder.path().c_str(), 01777), 0);
  const auto said = refusal_in_process(folder, [] { return ::setuid(23456) == 0; });
  ASSERT_TRUE(said);
  EXPECT_TRUE(has(*said, {"can be replaced", "Operation not permitted", "(a)"}));
}

TEST(TextFile, IsReadUpToItsLimit) {
  const TempFolder folder;
  const std::string path = folder.write("a", "12345");
  EXPECT_EQ(read_text_file(path, 5), "12345");
  EXPECT_TRUE(
      has(error_of<IoError>([&] { read_text_file(path, 4); }), {"at most 4", "got 5", path}));
}

TEST(TextFile, HoldsATextOrAnother) {
  const TempFolder folder;
  const std::string path = folder.write("a", "12345");
  EXPECT_TRUE(holds_text(path, "12345"));
  for (const char* other : {"", "1234", "12346", "123456"}) EXPECT_FALSE(holds_text(path, other));
  EXPECT_FALSE(holds_text(folder / "none", ""));
  EXPECT_FALSE(holds_text(folder.path(), ""));
}

/// mount(), whose header does not go with that of the attributes.
bool mount_there(const char* source, const char* target, unsigned long flags) {
  return ::syscall(SYS_mount, source, target, nullptr, flags, nullptr) == 0;
}

TEST(AtomicFile, IsRefusedAtOnceAtAMountPoint) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  const auto said = refusal_in_process(folder, [] {
    return ::unshare(CLONE_NEWNS) == 0 && mount_there("none", "/", MS_REC | MS_PRIVATE) &&
           mount_there("a", "a", MS_BIND);
  });
  if (!said) {  // not root: what the system would say
    const FaultHere fault({"rmdir", below(folder, "a"), 1, std::to_string(EBUSY)});
    EXPECT_TRUE(has(error_of<IoError>([&] { AtomicFile file(path); }),
                    {"can be replaced", "Device or resource busy", path}));
    return;
  }
  EXPECT_TRUE(has(*said, {"can be replaced", "Device or resource busy", "(a)"}));
}

}  // namespace
}  // namespace tessera::engine

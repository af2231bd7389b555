// Files by which processes of one user find each other: how they appear, and which are refused.
#include "comm/control/private_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/temp_folder.h"

namespace tessera::comm::control {
namespace {

using engine::IoError;
using testing::error_of;
using testing::FaultHere;
using testing::has;
using testing::TempFolder;
namespace fs = std::filesystem;

const std::vector<std::byte> kBytes(300, std::byte{7});

std::string error_of_reading(const std::string& path) {
  return error_of<IoError>([&] { read_private(path, 1000); });
}

TEST(PrivateFileTest, WhatIsPublishedIsPrivateAndRead) {
  const TempFolder folder;
  const std::string path = folder / "meet";
  EXPECT_EQ(read_private(path, 1000), std::nullopt);
  publish(path, kBytes);
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(read_private(path, 1000), kBytes);
  EXPECT_TRUE(has(error_of<IoError>([&] { publish(path, {}); }),
                  {"expected no file " + path, "another job"}));
  EXPECT_EQ(read_private(path, 1000), kBytes);
  {
    // As NFS has it where another host has just replaced the file.
    const FaultHere fault({"open", below(folder, "meet"), 1, std::to_string(ESTALE)});
    EXPECT_EQ(read_private(path, 1000), std::nullopt);
    EXPECT_EQ(read_private(path, 1000), kBytes);
  }
  { const Unlink remove(path); }
  EXPECT_EQ(folder.num_entries(), 0);
}

TEST(PrivateFileTest, FilesOfOthersAreRefused) {
  const TempFolder folder;
  const std::string path = folder.write("meet", "x");
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  EXPECT_TRUE(has(error_of_reading(path), {"expected a private file (0600), got 0644"}));
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(read_private(path, 1)->size(), 1u);
  EXPECT_TRUE(has(error_of<IoError>([&] { read_private(path, 0); }), {"at most 0 bytes, got 1"}));
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(path.c_str(), 12345, -1), 0);
    EXPECT_TRUE(has(error_of_reading(path), {"expected a file of user 0, got one of 12345"}));
  }

  fs::create_symlink("/etc/passwd", folder / "link");
  EXPECT_TRUE(has(error_of_reading(folder / "link"), {"expected to open"}));
  fs::create_directory(folder / "folder");
  EXPECT_TRUE(has(error_of_reading(folder / "folder"), {"expected a plain file"}));
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_TRUE(has(error_of_reading(folder / "fifo"), {"expected a plain file"}));
}

TEST(PrivateFileTest, FoldersOfOthersAreRefused) {
  const TempFolder folder;
  const auto error = [&] { return error_of<IoError>([&] { check_folder(folder / "meet"); }); };
  for (const mode_t mode : {0777, 0707, 0770}) {
    ASSERT_EQ(::chmod(folder.path().c_str(), mode), 0);
    EXPECT_TRUE(has(error(), {"nobody else may write to", "got 07"}));
  }
  for (const mode_t mode : {01777, 0755}) {
    ASSERT_EQ(::chmod(folder.path().c_str(), mode), 0);
    EXPECT_NO_THROW(check_folder(folder / "meet"));
  }
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(folder.path().c_str(), 12345, -1), 0);
    EXPECT_TRUE(has(error(), {"got one of 12345"}));
  }
}

TEST(PrivateFileTest, AFailureSaysItsOwnReasonAndLeavesNothing) {
  const TempFolder folder;
  {
    const FaultHere fault({"fsync", below(folder, "meet"), 1, std::to_string(EIO)});
    errno = 0;
    EXPECT_TRUE(has(error_of<IoError>([&] { publish(folder / "meet", kBytes); }),
                    {"expected to write", "Input/output error"}));
  }
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string read = error_of_reading(folder / "meet");
  const std::string written = error_of<IoError>([&] { publish(folder / "meet", kBytes); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(has(read, {"Too many open files"}));
  EXPECT_TRUE(has(written, {"Too many open files"}));
  EXPECT_EQ(folder.num_entries(), 0);
}

}  // namespace
}  // namespace tessera::comm::control

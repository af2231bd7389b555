// A comparison writes through no link that somebody has laid in its folder.
#include <gtest/gtest.h>

#include <filesystem>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/compare/comparison_folder.h"
#include "tools/compare/request/training_process.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(LinksTest, NoLockIsALink) {
  const TempFolder folder;
  std::filesystem::create_symlink(folder / "elsewhere", folder / ".lock");
  EXPECT_TRUE(has(error_of<IoError>([&] { lock_folder(folder.path()); }),
                  {"expected a folder that can be written to", folder.path()}));
  EXPECT_EQ(folder.num_entries(), 1);
  std::filesystem::remove(folder / ".lock");
  EXPECT_TRUE(lock_folder(folder.path()).is_open());
}

TEST(LinksTest, WhatATrainingSaysOverwritesNothingElse) {
  const TempFolder folder;
  const std::string precious = folder.write("precious", "kept");
  std::filesystem::create_symlink(precious, folder / "console.txt");
  const auto run = [&] { return run_process("/bin/echo", {"text"}, folder / "console.txt"); };
  EXPECT_TRUE(has(error_of<IoError>(run), {"expected a file to print to", "console.txt"}));
  EXPECT_EQ(folder.read("precious"), "kept");
  std::filesystem::remove(folder / "console.txt");
  EXPECT_EQ(run().exit_code, 0);
  EXPECT_EQ(folder.read("console.txt"), "text\n");
}

}  // namespace
}  // namespace tessera::tools

// Files of other hosts, which are seen late, or as what they were before.
#include "engine/io/late_files.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/temp_folder.h"

namespace tessera::engine {
namespace {

using testing::below;
using testing::error_of;
using testing::FaultHere;
using testing::has;
using testing::TempFolder;

TEST(LateFiles, AreAskedForUntilTheyAreSeen) {
  const TempFolder folder;
  int num_calls = 0;
  EXPECT_TRUE(seen_late(folder / "a", [&] { return ++num_calls > 0; }));
  EXPECT_EQ(num_calls, 1);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    folder.write("a", "text");
  });
  EXPECT_TRUE(seen_late(folder / "a", [&] { return std::filesystem::exists(folder / "a"); }));
  other.join();
}

TEST(LateFiles, ThatNeverComeAreNotWaitedForForLong) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(seen_late("none/a", [] { return false; }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(LateFiles, LookingAgainOpensTheFoldersThatLeadThere) {
  const TempFolder folder, lists;
  {
    const FaultHere fault({"open", below(folder, ""), -1, lists / "opened"});
    look_again(folder / "run/step_2/file");
  }
  const std::string start = "open " + folder / "run";
  EXPECT_EQ(lists.read("opened"), start + "\n" + start + "/step_2\n" + start + "/step_2/file\n");
}

TEST(LateFiles, AFileThatWasReplacedIsOpenedAgain) {
  const TempFolder folder;
  const std::string path = folder.write("a", "text");
  {
    const FaultHere fault({"open", below(folder, "a"), 1, std::to_string(ESTALE)});
    EXPECT_EQ(read_text_file(path, 10), "text");
  }
  const FaultHere fault({"open", below(folder, "a"), 1, std::to_string(ENOENT)});
  EXPECT_TRUE(has(error_of<IoError>([&] { (void)read_text_file(path, 10); }), {"No such file"}));
}

}  // namespace
}  // namespace tessera::engine

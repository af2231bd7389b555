// A training of an earlier comparison that still writes where the next one would.
#include "tools/compare/request/training_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <string>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using std::chrono::milliseconds;
using testing::error_of;
using testing::has;

TEST(WaitForFolder, EndsAtOnceWhereNobodyWrites) {
  const testing::TempFolder folder;
  wait_for_folder(folder / "is not there", milliseconds(0));
  folder.write(".lock", "");
  folder.write("log.jsonl", "");
  wait_for_folder(folder.path(), milliseconds(0));
}

TEST(WaitForFolder, IsBounded) {
  const testing::TempFolder folder;
  for (const char* name : {".lock", "log.jsonl"}) {
    const engine::FileDescriptor held(::open(folder.write(name, "").c_str(), O_WRONLY));
    ASSERT_EQ(engine::try_lock(held), engine::Lock::kTaken);
    EXPECT_TRUE(
        has(error_of<engine::IoError>([&] { wait_for_folder(folder.path(), milliseconds(50)); }),
            {"[trainer] expected an earlier training to end", "--resume", folder.path()}));
  }
}

TEST(RunProcess, NothingThatALauncherHasStartedOutlivesIt) {
  const testing::TempFolder folder;
  const std::string script = "setsid \"$@\" & echo $! > " + (folder / "pid") + "; exit 3";
  const ProcessEnd end = run_process("/bin/sleep", {"1000"}, folder / "console",
                                     {.words = {"sh", "-c", script, "sh"}, .path = "/bin/sh"});
  EXPECT_EQ(end.exit_code, 3);
  EXPECT_NE(::kill(std::stoi(folder.read("pid")), 0), 0);
}

}  // namespace
}  // namespace tessera::tools

// The check of a GPU, on a GPU or the emulated one: it finds the device and trains on it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

TEST(GpuCheck, MeasuresTheDeviceAndTrainsAsOnTheCpu) {
  const TempFolder folder;
  const Outcome made =
      run_program("tools/gpu_bundle",
                  std::vector<std::string>{folder / "bundle", "--max_mib=1000", "--symbols"});
  ASSERT_EQ(made.exit_code, 0) << made.out << made.err;
  const Outcome outcome = run_program(
      folder / "bundle/gpu_check.sh",
      std::vector<std::string>{"--small", "--parts=machine,losses,steps", folder / "out"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"product bf16"})) << outcome.out;
  EXPECT_TRUE(has(outcome.out, {"whole step"})) << outcome.out;
  EXPECT_TRUE(outcome.out.ends_with("\n6 passed, 0 failed\n")) << outcome.out;
}

}  // namespace
}  // namespace tessera

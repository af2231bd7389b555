#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "engine/device.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera::testing {
namespace {

constexpr const char* kProgram = "tools/kernel_report/kernel_report_of";

TEST(KernelReport, SaysWhatChangedSinceItsPage) {
  const TempFolder folder;
  const std::string compiled = folder / "compiled.txt";
  folder.write("compiled.txt",
               "release 13.0, V13\nfile a.cu\nCompiling entry function 'f' for 'sm_90'\n"
               "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
               "Used 10 registers, used 0 barriers\n");
  const Outcome page = run_program(kProgram, Flags{{"compiled", compiled}});
  EXPECT_EQ(page.exit_code, 0) << page.err;
  folder.write("page.md", page.out);
  const Flags flags = {{"compiled", compiled}, {"compare", folder / "page.md"}};
  const Outcome same = run_program(kProgram, flags);
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(same.out, "1 kernels as before\n");
  std::string other = page.out;
  other.replace(other.find("| 10 |"), 6, "| 11 |");
  folder.write("page.md", other);
  const Outcome changed = run_program(kProgram, flags);
  EXPECT_EQ(changed.exit_code, 1);
  EXPECT_EQ(changed.out,
            "f (a.cu): 11 registers, stack 0, spilled 0, loaded back 0, shared 0 -> "
            "10 registers, stack 0, spilled 0, loaded back 0, shared 0\n");
}

// As the build hands it over: with a toolkit a page, without one an error.
TEST(KernelReport, TakesWhatTheBuildCompiled) {
  const Outcome outcome = run_program(
      kProgram,
      Flags{{"compiled", std::filesystem::absolute("tests/tools/kernel_report/core_kernels.txt")}});
  if (engine::kCudaBuilt) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_NE(outcome.out.find("engine/elementwise.cu"), std::string::npos) << outcome.out;
  } else {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_NE(outcome.err.find("CUDA_HOME"), std::string::npos) << outcome.err;
  }
}

}  // namespace
}  // namespace tessera::testing

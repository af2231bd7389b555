// The check of a GPU, on a GPU or the emulated one: it finds the device and trains on it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
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

void make_bundle(const TempFolder& folder) {
  const Outcome made =
      run_program("tools/gpu_bundle",
                  std::vector<std::string>{folder / "bundle", "--max_mib=1000", "--symbols"});
  ASSERT_EQ(made.exit_code, 0) << made.out << made.err;
}

TEST(GpuCheck, MeasuresTheDeviceAndTrainsAsOnTheCpu) {
  const TempFolder folder;
  make_bundle(folder);
  const Outcome outcome = run_program(
      folder / "bundle/gpu_check.sh",
      std::vector<std::string>{
          "--small", "--parts=machine,gemm,attention,losses,profile,trace,steps", folder / "out"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  // A table of each part, as text and as records.
  for (const char* text : {"product bf16", "algorithm", "wgmma", "whole step", "compile_ratio"}) {
    EXPECT_TRUE(has(outcome.out, {text})) << outcome.out;
  }
  const std::string records = folder.read("out/results.jsonl");
  for (const char* part :
       {"device", "gemm", "attention", "profile", "trace", "steps", "losses", "summary"}) {
    EXPECT_TRUE(has(records, {fmt::format(R"("part":"{}")", part)})) << part << "\n" << records;
  }
  for (const char* way : {"none", "idle", "every"}) {
    EXPECT_TRUE(has(records, {fmt::format(R"("part":"trace","way":"{}","step_ms":)", way)}))
        << records;
  }
  EXPECT_TRUE(outcome.out.ends_with("\n10 passed, 0 failed\n")) << outcome.out;
}

// With a sanitizer that says what it was asked and finds nothing.
TEST(GpuCheck, SanitizersLookAtOurKernels) {
  const TempFolder folder;
  make_bundle(folder);
  const std::string sanitizer = folder.write("compute-sanitizer",
                                             "#!/bin/sh\n"
                                             "echo \"$*\" >>$(dirname $0)/asked\n"
                                             "echo '[       OK ] Some.Test (0 ms)'\n");
  std::filesystem::permissions(sanitizer, std::filesystem::perms::owner_all);
  const Outcome outcome =
      run_program(folder / "bundle/gpu_check.sh",
                  std::vector<std::string>{"--small", "--parts=machine,sanitizer", folder / "out"},
                  {{"PATH", folder / "" + ":/usr/bin:/bin"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  std::ifstream asked(folder / "asked");
  int num_lines = 0;
  for (std::string line; std::getline(asked, line); ++num_lines) {
    EXPECT_EQ(has(line, {"--kernel-name kns=tessera"}), has(line, {"--tool racecheck"})) << line;
    EXPECT_EQ(has(line, {":*Fused*"}), has(line, {"--tool initcheck"})) << line;
  }
  EXPECT_GE(num_lines, 3 * 5) << outcome.out;
}

}  // namespace
}  // namespace tessera

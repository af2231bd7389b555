// The doctor as a person meets it: the program, its lines and its exit code.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

const std::string kDoctor = "tools/doctor/doctor";

TEST(Doctor, FindsNothingBrokenWhereTestsRun) {
  const TempFolder folder;
  const Outcome outcome = run_program(kDoctor, Flags{{"json", "true"}, {"out", folder / "runs"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_NE(report.at("verdict"), "FAIL");
  std::set<std::string> names;
  for (const json& check : report.at("checks")) {
    names.insert(check.at("name").get<std::string>());
    EXPECT_EQ(check.at("fix").get<std::string>().empty(), check.at("verdict") == "ok") << check;
  }
  for (const char* name : {"cpu", "products", "cores", "memory", "huge pages", "gpus", "nccl",
                           "locked memory", "open files", "text", "images", "output", "product",
                           "memcpy", "all_gather", "reduce_scatter"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_EQ(folder.num_entries(), 0);
}

TEST(Doctor, EndsWithOneWhereSomethingFails) {
  const Flags quick{{"self_test", "false"}};
  const Outcome isa = run_program(kDoctor, quick, {{"TESSERA_CPU_ISA", "v9"}});
  EXPECT_EQ(isa.exit_code, 1);
  EXPECT_TRUE(has(isa.out, {"FAIL  cpu ", "v9", "fix: unset TESSERA_CPU_ISA", " failed\n"}));
  const Outcome data = run_program(kDoctor, Flags{{"self_test", "false"}, {"data.path", "/none"}});
  EXPECT_EQ(data.exit_code, 1);
  EXPECT_TRUE(has(data.out, {"FAIL  text ", "/none", "fix: "}));
  const Outcome out = run_program(kDoctor, Flags{{"self_test", "false"}, {"out", "/proc/none"}});
  EXPECT_EQ(out.exit_code, 1);
  EXPECT_TRUE(has(out.out, {"FAIL  output "}));
}

TEST(Doctor, AWarningIsNoFailure) {
  const Outcome outcome =
      run_program(kDoctor, Flags{{"self_test", "false"}}, {{"SLURM_NTASKS", "4"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_TRUE(has(outcome.out, {"warn  variable ", "SLURM_NTASKS=4: not heeded"}));
}

TEST(Doctor, UnknownFlagsAreRefused) {
  const Outcome outcome = run_program(kDoctor, Flags{{"jsn", "true"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"jsn", "did you mean json?"}));
}

}  // namespace
}  // namespace tessera

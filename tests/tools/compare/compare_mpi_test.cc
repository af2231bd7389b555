// compare --launch with mpirun of Open MPI, as a person gives it.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/tiny_comparison.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::has;
using testing::Outcome;

class CompareMpi : public ::testing::Test {
 protected:
  CompareMpi() : flags_(testing::tiny_comparison(folder_)) {
    flags_["launch"] = "mpirun.openmpi --oversubscribe --bind-to none --quiet --timeout 60 -n '2'";
    flags_["strategies"] = "zero3";
    flags_["sweep"] = "parallel.launcher=auto,threads";
  }
  Outcome compare(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = testing::arguments_of(flags_);
    arguments.insert(arguments.end(), more.begin(), more.end());
    return testing::run_program(
        "tools/compare/compare", arguments,
        {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
  }

  const testing::TempFolder folder_;
  testing::Flags flags_;
};

TEST_F(CompareMpi, ProcessesHaveTheBitsOfThreads) {
  const Outcome outcome = compare();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  const json all = testing::parse_json(folder_.read("out/compare.json")).at("configurations");
  EXPECT_EQ(all.at(0).at("launch"), "openmpi: 1 host x 2 processes x 1 thread, transport mpi");
  EXPECT_TRUE(all.at(1).at("launch").is_null());
  EXPECT_EQ(all.at(0).at("params_sha256"), all.at(1).at("params_sha256"));
}

TEST_F(CompareMpi, FindsNoDivergence) {
  for (const char* name : {"strategies", "sweep", "warmup_steps"}) flags_.erase(name);
  const Outcome outcome = compare({"--find-divergence", "ddp", "parallel.launcher=threads"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"Nothing differs: "}));
}

}  // namespace
}  // namespace tessera::tools

// What launchers and people have set in vain, as programs tell it.
#include "tools/launch/launch_warnings.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera::tools {
namespace {

using testing::has;
using testing::Outcome;
using testing::run_program;

std::vector<std::string> warnings_of(const Environment& environment, const TrainConfig& config) {
  return launch_warnings(environment, find_launch(environment, LauncherChoice::kAuto), config);
}

TEST(LaunchWarnings, TellWhatALauncherDidNotDo) {
  const TrainConfig config;
  EXPECT_TRUE(warnings_of({{"HOME", "/"}}, config).empty());
  EXPECT_EQ(warnings_of({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "16"}}, config),
            std::vector<std::string>{
                "warning: in a Slurm job (SLURM_JOB_ID=7), but not started by srun: one process"});
}

TEST(LaunchWarnings, ThreadsOfTheEnvironmentAreNotThoseOfATrainer) {
  TrainConfig config;
  EXPECT_TRUE(warnings_of({{"TESSERA_CPU_THREADS", "1"}}, config).empty());
  EXPECT_TRUE(has(warnings_of({{"TESSERA_CPU_THREADS", "8"}}, config).at(0),
                  {"TESSERA_CPU_THREADS=8 ignored", "go by --cpu.threads_per_rank=1"}));
  config.cpu.threads_per_rank = 8;
  EXPECT_TRUE(has(warnings_of({{"TESSERA_CPU_THREADS", "4"}}, config).at(0),
                  {"TESSERA_CPU_THREADS=4 ignored", "go by --cpu.threads_per_rank=8"}));
  EXPECT_TRUE(warnings_of({{"TESSERA_CPU_THREADS", "8"}}, config).empty());
}

class LaunchedProgram : public testing::TinyTraining {};

TEST_F(LaunchedProgram, EveryProgramTellsOfANameThatNothingReads) {
  const std::map<std::string, std::string> programs = {{"train_transformer", testing::kTransformer},
                                                       {"train_mlp", testing::kMlp},
                                                       {"plan", "tools/programs/plan"},
                                                       {"compare", "tools/compare/compare"},
                                                       {"convert", "tools/convert/convert"},
                                                       {"doctor", "tools/doctor/doctor"}};
  for (const auto& [name, path] : programs) {
    const Outcome slip =
        run_program(path, std::vector<std::string>{"--help"}, {{"TESSERA_CPU_TREADS", "4"}});
    EXPECT_EQ(slip.err,
              "warning: TESSERA_CPU_TREADS is set, and nothing reads it; did you mean "
              "TESSERA_CPU_THREADS?\n")
        << name;
    const Outcome other =
        run_program(path, std::vector<std::string>{"--help"}, {{"TESSERA_OUTPUT", "x"}});
    EXPECT_TRUE(has(other.err, {"warning: TESSERA_OUTPUT is set, and nothing reads it"})) << name;
    EXPECT_EQ(
        run_program(path, std::vector<std::string>{"--help"}, {{"TESSERA_CPU_THREADS", "1"}}).err,
        "");
  }
}

}  // namespace
}  // namespace tessera::tools

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

TEST(LaunchWarnings, TellNumbersOfProcessesThatNoLauncherSet) {
  const TrainConfig config;
  const auto of = [&](const Environment& environment) { return warnings_of(environment, config); };
  const std::string why =
      " not heeded, as nothing else says that a launcher has started this process: one process";
  using Lines = std::vector<std::string>;
  EXPECT_EQ(of({{"SLURM_NTASKS", "4"}}), Lines{"warning: SLURM_NTASKS=4" + why});
  EXPECT_EQ(of({{"LOCAL_RANK", "1"}}), Lines{"warning: LOCAL_RANK=1" + why});
  EXPECT_EQ(of({{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}, {"SLURM_NTASKS", "2"}}),
            Lines{"warning: LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, SLURM_NTASKS=2" + why});
  EXPECT_TRUE(of({{"SLURM_NTASKS", "1"}, {"MASTER_ADDR", "h1"}, {"LOCAL_RANK", ""}}).empty());
  // What a launcher has set beside its own numbers is as it should be.
  EXPECT_TRUE(of({{"RANK", "0"},
                  {"WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "h1"},
                  {"MASTER_PORT", "29500"},
                  {"SLURM_NTASKS", "2"}})
                  .empty());
}

TEST(LaunchWarnings, OpenMpsThreadsAreToldWhereTheyAreOthers) {
  TrainConfig config;  // 4 ranks of one thread
  const auto of = [&](const char* threads) {
    return warnings_of({{"OMP_NUM_THREADS", threads}}, config);
  };
  EXPECT_EQ(of("2"),
            std::vector<std::string>{"note: OMP_NUM_THREADS=2 not heeded: on the CPU 4 ranks with "
                                     "--cpu.threads_per_rank=1 work, as --parallel.ranks says"});
  for (const char* threads : {"1", "4", "", "many", "0"}) EXPECT_TRUE(of(threads).empty());
  config.cpu.threads_per_rank = 2;
  EXPECT_TRUE(of("2").empty());
  EXPECT_TRUE(of("8").empty()) << "all together";
  config.parallel.ranks = 1;
  EXPECT_TRUE(has(of("8").at(0), {"1 rank with --cpu.threads_per_rank=2 works"}));
  config.device = DeviceChoice::kCuda;
  EXPECT_TRUE(of("8").empty());
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

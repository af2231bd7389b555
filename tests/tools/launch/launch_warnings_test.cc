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

using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;

const Environment kMpirun = {{"OMPI_COMM_WORLD_RANK", "1"},
                             {"OMPI_COMM_WORLD_SIZE", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};

TEST(LaunchWarnings, NameTheOptionThatDoesIt) {
  TrainConfig config;
  EXPECT_TRUE(launch_warnings({{"WORLD_SIZE", "1"}, {"RANK", "0"}, {"HOME", "/"}}, config).empty());
  const auto lines = launch_warnings(kMpirun, config);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "warning: openmpi, process 1 of 2 (1 of 2 on host 0 of 1): each process that a "
            "launcher starts trains a model of its own; start one, with --parallel.ranks=2");
}

TEST(LaunchWarnings, TellWhatALauncherDidNotDo) {
  const TrainConfig config;
  EXPECT_EQ(launch_warnings({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "16"}}, config),
            std::vector<std::string>{
                "warning: in a Slurm job (SLURM_JOB_ID=7), but not started by srun: one process"});
  EXPECT_EQ(launch_warnings({{"WORLD_SIZE", "2"}}, config),
            std::vector<std::string>{
                "warning: [launcher] expected RANK with WORLD_SIZE=2, got none (env)"});
}

TEST(LaunchWarnings, ThreadsOfTheEnvironmentAreNotThoseOfATrainer) {
  TrainConfig config;
  EXPECT_TRUE(launch_warnings({{"TESSERA_CPU_THREADS", "1"}}, config).empty());
  EXPECT_TRUE(has(launch_warnings({{"TESSERA_CPU_THREADS", "8"}}, config).at(0),
                  {"TESSERA_CPU_THREADS=8 ignored", "go by --cpu.threads_per_rank=1"}));
  config.cpu.threads_per_rank = 8;
  EXPECT_TRUE(has(launch_warnings({{"TESSERA_CPU_THREADS", "4"}}, config).at(0),
                  {"TESSERA_CPU_THREADS=4 ignored", "go by --cpu.threads_per_rank=8"}));
  EXPECT_TRUE(launch_warnings({{"TESSERA_CPU_THREADS", "8"}}, config).empty());
}

class Launched2 : public testing::TinyTraining {};

TEST_F(Launched2, ATrainerSaysThatItIsOneOfSeveral) {
  const Outcome outcome = run_program(testing::kTransformer, with({{"train.steps", "1"}}), kMpirun);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"warning: openmpi, process 1 of 2", "--parallel.ranks=2\n"}));
  EXPECT_EQ(run({{"train.steps", "1"}}).out.find("of its own"), std::string::npos);
}

TEST_F(Launched2, EveryProgramTellsOfANameThatNothingReads) {
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

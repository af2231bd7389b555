// Trainings that mpirun of Open MPI starts where it says no address, and over something else than
// MPI: MPI tells their processes where they meet, and no more.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/mpi_training.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::MpiProcesses;
using testing::Own;

class MpiMeeting : public testing::MpiTraining {
 protected:
  // Each as on a host of its own, with one GPU: then Open MPI's variables say no address.
  MpiProcesses on_hosts(int num_processes, const Flags& more,
                        const std::vector<std::string>& options = {}) const {
    std::map<int, Own> own;
    for (int p = 0; p < num_processes; ++p) {
      own[p] = {.environment = {
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                    {"CUDA_EMULATION", "devices=1,host=" + std::to_string(p)},
                    // Where the loader finds the plug-in of this test's own build.
                    {"LD_LIBRARY_PATH", std::filesystem::absolute("comm").string()},
                }};
    }
    return mpirun(num_processes, more, own, options);
  }
};

TEST_F(MpiMeeting, OverNccl) {
  const Flags gpus = {{"device", "cuda"}, {"parallel.canonical", "true"}};
  const auto end = on_hosts(3, gpus).wait();
  Flags again = gpus;
  again["cuda.gemm_algorithms"] = folder_ / "run/gemm_algorithms.txt";
  EXPECT_EQ(sha256_of(end.mpirun), of_threads(3, again)) << end.err[0];
  EXPECT_TRUE(has(end.mpirun.out, {"\nopenmpi: 3 processes x 1 thread, transport nccl\n"}));
}

TEST_F(MpiMeeting, OverGloo) {
  const Flags gloo = {
      {"device", "cpu"}, {"parallel.transport", "gloo"}, {"parallel.interface", "127.0.0.1"}};
  const auto end = on_hosts(2, gloo).wait();
  EXPECT_EQ(sha256_of(end.mpirun), of_threads(2, {{"device", "cpu"}})) << end.err[0];
  EXPECT_TRUE(has(end.mpirun.out, {"\nopenmpi: 2 processes x 1 thread, transport gloo\n"}));
}

// Told to leave the others alone, mpirun does not end them itself.
TEST_F(MpiMeeting, WhoeverIsKilledAfterwardsIsNamedByTheOthers) {
  auto processes = on_hosts(
      3, {{"device", "cuda"}, {"train.steps", "1000000000"}, {"train.schedule", "constant"}},
      {"--enable-recovery"});
  wait_until(processes,
             [&] { return folder_.read("run/log.jsonl").find("\"step\"") != std::string::npos; });
  processes.send(1, SIGKILL);
  const auto end = processes.wait();
  for (const std::size_t p : {0, 2}) EXPECT_TRUE(has(end.err[p], {"lost process 1 ("}));
}

}  // namespace
}  // namespace tessera

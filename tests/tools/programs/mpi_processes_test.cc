// Trainings that mpirun of Open MPI starts have the numbers of those whose ranks are threads.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/process_training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::Flags;
using testing::has;
using testing::kTransformer;
using testing::Outcome;

class MpiProcessesTest : public testing::ProcessTraining {
 protected:
  Outcome mpirun(int num_processes, const Flags& more) {
    std::vector<std::string> words = {"--oversubscribe", "--bind-to", "none",
                                      "--quiet",         "--timeout", "60"};
    words.insert(words.end(), {"-n", std::to_string(num_processes), fs::absolute(kTransformer)});
    for (const std::string& flag : testing::arguments_of(with(more))) words.push_back(flag);
    return testing::run_program(
        "/usr/bin/mpirun.openmpi", words,
        {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
  }
};

TEST_F(MpiProcessesTest, HaveTheBitsOfThreads) {
  const Flags accumulates = {{"train.accum", "2"}, {"model.dropout", "0.1"}};
  const Outcome two = mpirun(2, accumulates);
  EXPECT_EQ(sha256_of(two), of_threads(2, accumulates)) << two.err;
  EXPECT_TRUE(has(two.out, {"device: cpu, 2 ranks, mpi, ",
                            "\nopenmpi: 1 host x 2 processes x 1 thread, transport mpi\n"}));
  EXPECT_EQ(two.out.find('\x1b'), std::string::npos) << "mpirun's own terminals are nobody's";
  const Flags hybrid = {{"parallel.strategy", "hsdp"}, {"precision.param", "bf16"}};
  EXPECT_EQ(sha256_of(mpirun(4, hybrid)), of_threads(4, hybrid));
}

}  // namespace
}  // namespace tessera

// Trainings that mpirun of Open MPI starts have the numbers of those whose ranks are threads.
#include <gtest/gtest.h>

#include <string>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/mpi_training.h"
#include "tests/tools/testing/strategy_cases.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Outcome;

class MpiProcessesTest : public testing::MpiTraining {};

TEST_F(MpiProcessesTest, HaveTheBitsOfThreads) {
  const Flags accumulates = {{"train.accum", "2"}, {"model.dropout", "0.1"}};
  const Outcome two = mpirun(2, accumulates).wait().mpirun;
  EXPECT_EQ(sha256_of(two), of_threads(2, accumulates)) << two.err;
  EXPECT_TRUE(has(two.out, {"device: cpu, 2 ranks, mpi, ",
                            "\nopenmpi: 1 host x 2 processes x 1 thread, transport mpi\n"}));
  EXPECT_EQ(two.out.find('\x1b'), std::string::npos) << "mpirun's own terminals are nobody's";
  const Flags hybrid = {{"parallel.strategy", "hsdp"}, {"precision.param", "bf16"}};
  EXPECT_EQ(sha256_of(mpirun(4, hybrid).wait().mpirun), of_threads(4, hybrid));
}

TEST_F(MpiProcessesTest, EveryStrategyHasTheBitsOfThreads) {
  for (const testing::StrategyCase& c : testing::strategy_cases()) {
    for (const int n : {2, 3, 4}) {
      Flags options = c.options;
      options["parallel.strategy"] = c.strategy;
      EXPECT_EQ(sha256_of(mpirun(n, options).wait().mpirun), of_threads(n, options))
          << c.strategy << " on " << n;
    }
  }
}

TEST_F(MpiProcessesTest, RecordTheChecksumsOfThreads) {
  Flags probed = {{"log.probe", folder_ / "probe.jsonl"}};
  of_threads(4, probed);
  probed["parallel.threads"] = "2";
  sha256_of(mpirun(2, probed).wait().mpirun);
  EXPECT_EQ(lines_of_record(folder_ / "probe.jsonl"), lines_of_record(folder_ / "threads.jsonl"));
}

}  // namespace
}  // namespace tessera

// Trainings whose launcher is of another MPI than the one that they load: it starts as many worlds
// of one process as there are processes.
#include <gtest/gtest.h>

#include <string>

#include "tests/testing/errors.h"
#include "tests/testing/mpi_launcher.h"
#include "tests/tools/testing/mpi_training.h"

namespace tessera {
namespace {

using testing::has;
using testing::mpich;
using testing::open_mpi;
using testing::Own;

class OtherMpi : public testing::MpiTraining,
                 public ::testing::WithParamInterface<testing::MpiLauncher> {
 protected:
  OtherMpi() { launcher_ = GetParam(); }
};

TEST_P(OtherMpi, IsRefused) {
  const testing::MpiLauncher& other = launcher_.name == mpich().name ? open_mpi() : mpich();
  const Own its{.environment = {{"LD_PRELOAD", other.library}}};
  const auto end = mpirun(2, {}, {{0, its}, {1, its}}).wait();
  EXPECT_NE(end.mpirun.exit_code, 0);
  EXPECT_TRUE(has(end.err[0] + end.err[1], {"error: ", "[join] expected process ",
                                            " of 2 over " + other.version, "got process 0 of 1"}));
  EXPECT_FALSE(exists("run/config.toml"));
}

INSTANTIATE_TEST_SUITE_P(Launchers, OtherMpi, ::testing::Values(open_mpi(), mpich()),
                         testing::launcher_name);

}  // namespace
}  // namespace tessera

// main() of every test: on the CPU it computes as TESSERA_CPU_* ask for, as programs do, so that
// one build tests each instruction set and each library (.ci/run cpus).
#include <gtest/gtest.h>

#include "tools/launch/cpu_wishes.h"

int main(int argc, char** argv) {
  tessera::tools::choose_cpu_by_environment();  // before parameters of tests are made
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

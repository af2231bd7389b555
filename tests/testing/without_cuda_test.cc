// What stands for each GPU test in a build without a CUDA toolkit: such tests fail, they are not
// skipped.
#include <gtest/gtest.h>

TEST(Gpu, NeedsABuildWithTheCudaToolkit) {
  FAIL() << "expected a build with a CUDA toolkit and a GPU, got a build without the toolkit";
}

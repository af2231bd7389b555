#include "third_party/cuda/toolkit.h"

#include <gtest/gtest.h>

namespace tessera::cuda {
namespace {

#ifdef TESSERA_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

TEST(CudaToolkit, HasAVersionExactlyWhenTheBuildFoundOne) {
  EXPECT_EQ(toolkit_version() > 0, kBuiltWithCuda) << "toolkit version " << toolkit_version();
}

}  // namespace
}  // namespace tessera::cuda

// What is said where a program is about to take more memory than there is.
#include "tools/planning/require_memory.h"

#include <gtest/gtest.h>

#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

TEST(RequireMemory, NamesBothFiguresAndWhoseTheLimitIs) {
  MachineLimits limits{.memory_nbytes = 4096 * kMiB, .available_nbytes = 1000 * kMiB};
  const auto error = [&](std::int64_t nbytes) {
    return error_of<engine::DeviceError>(
        [&] { require_memory(nbytes, "the model", "try a smaller one", limits); });
  };
  EXPECT_NO_THROW(require_memory(1000 * kMiB, "the model", "", limits));
  EXPECT_EQ(error(1001 * kMiB),
            "[memory] expected 1001.0 MiB of memory for the model, got 1000.0 MiB that are free: "
            "this machine has 4.0 GiB; try a smaller one");
  limits.cgroup_limit_nbytes = 500 * kMiB;
  limits.cgroup_used_nbytes = 12 * kMiB;
  EXPECT_TRUE(has(error(489 * kMiB), {"got 488.0 MiB", "a cgroup", "allows 500.0 MiB"}));
  limits.address_limit_nbytes = 400 * kMiB;
  limits.address_used_nbytes = 100 * kMiB;
  EXPECT_TRUE(has(error(301 * kMiB), {"got 300.0 MiB", "ulimit -v allows 400.0 MiB"}));
  EXPECT_NO_THROW(require_memory(kMiB, "it", "", MachineLimits{})) << "nothing is known";
}

}  // namespace
}  // namespace tessera::tools

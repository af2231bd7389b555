// Planning on a system that has no memory left: an error, wherever that happens.
#include <gtest/gtest.h>

#include <cstdint>
#include <new>

#include "tests/testing/failing_new.h"
#include "tests/tools/testing/planned_gpt.h"

namespace tessera::tools {
namespace {

// Work that is launched tells its listeners, which may not throw and yet need memory.
TEST(PlanningWithoutMemory, IsAnErrorWhereverMemoryRunsOut) {
  const GptConfig sizes = {.layers = 1, .heads = 1, .dim = 4, .seq = 4, .vocab = 16};
  const TrainConfig config = testing::base(/*ranks=*/1);
  testing::plan_of(config, sizes);  // what is made once
  const TrainPlan whole = testing::plan_of(config, sizes);
  int num_failed = 0;
  std::int64_t num_news = 1;
  for (std::int64_t n = 0; n < num_news; ++n) {
    testing::fail_new_after(n, testing::Fails::kOne);
    const std::int64_t before = testing::num_news();
    try {
      const TrainPlan plan = testing::plan_of(config, sizes);
      testing::never_fail_new();
      // Some can do without, such as a sort without its buffer.
      EXPECT_EQ(plan.num_launches, whole.num_launches) << n;
      EXPECT_EQ(plan.peak_at, whole.peak_at) << n;
      EXPECT_EQ(peak_nbytes(plan), peak_nbytes(whole)) << n;
      num_news = testing::num_news() - before;
    } catch (const std::bad_alloc&) {
      testing::never_fail_new();
      ++num_failed;
      num_news = n + 2;
    }
  }
  EXPECT_GT(num_failed, 1000);
}

}  // namespace
}  // namespace tessera::tools

// Models of every shape on GPUs: nested, tied, repeated and changing blocks, several losses. They
// have the bits of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/cuda.h"
#include "tests/shard/usage_patterns.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using testing::Pattern;
using testing::PatternTraining;
using testing::train_pattern;

// Not 0 where these tests can run.
int num_gpus() {
  const int count = engine::kCudaBuilt ? engine::cuda::num_devices() : 0;
  EXPECT_GT(count, 0) << "these tests need a GPU";
  return std::clamp(count, 1, 2);
}

class CudaPatterns : public ::testing::TestWithParam<Pattern> {};

TEST_P(CudaPatterns, HaveTheBitsOfTheCpu) {
  const Pattern& pattern = GetParam();
  PatternTraining run{.ranks = 2, .accum = 2, .num_backwards = pattern.num_backwards};
  run.options.placement = Placement::preset("ddp");
  const std::vector<float> expected = train_pattern(run, pattern.run);
  run.num_gpus = num_gpus();
  struct Choice {
    const char* strategy;
    int prefetch;
    std::int64_t unit_min_numel;
    bool is_delayed;
    double offload;
  };
  const Choice choices[] = {{"zero3", 1, 0, true, 0},
                            {"zero3", 2, 500, false, 0.6},
                            {"shard_grad_op", 0, 0, false, 0},
                            {"ddp", 1, 0, true, 0}};
  for (const auto& [strategy, prefetch, unit_min_numel, is_delayed, offload] : choices) {
    if (testing::kIsSlow && !is_delayed) continue;
    run.options.placement = Placement::preset(strategy);
    run.options.prefetch = prefetch;
    run.options.unit_min_numel = unit_min_numel;
    run.options.offload = {.parameters = offload, .gradients = offload, .optimizer = offload};
    run.is_async = is_delayed;
    run.poison = !is_delayed;  // which would hide waits
    EXPECT_EQ(train_pattern(run, pattern.run), expected) << strategy << " prefetch " << prefetch;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaPatterns, ::testing::ValuesIn(testing::patterns()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::shard

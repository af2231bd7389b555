// Choices that meet, on GPUs: every pair of them has the bits of one process on the CPU.
#include <gtest/gtest.h>

#include <cstddef>

#include "engine/cuda.h"
#include "tests/shard/option_pairs.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/covering.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

TEST(CudaCovering, EveryPairOfChoicesHasTheBitsOfOneProcessOnTheCpu) {
  const int num_gpus = engine::kCudaBuilt ? engine::cuda::num_devices() : 0;
  ASSERT_GT(num_gpus, 0) << "this test needs a GPU";
  const auto rows = testing::covering_rows(testing::kLevels, testing::is_allowed).rows;
  for (std::size_t number = 0; number < rows.size(); ++number) {
    if (testing::kIsSlow && number % 5 != 0) continue;
    testing::Training run = testing::training_of(rows[number]);
    run.num_gpus = num_gpus;
    if (number % 4 == 0) run.delay_seed = 1 + number;
    EXPECT_TRUE(testing::train(run) == testing::one_process(run))
        << "row " << number << ": " << ::testing::PrintToString(rows[number]);
  }
}

}  // namespace
}  // namespace tessera::shard

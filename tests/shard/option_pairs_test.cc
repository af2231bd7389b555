// Choices that meet: every pair of them has the bits of one process.
#include <gtest/gtest.h>

#include <cstddef>
#include <set>

#include "tests/shard/option_pairs.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/covering.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using testing::LevelPair;
using testing::Training;
using enum testing::Choice;

TEST(Covering, EveryPairOfChoicesHasTheBitsOfOneProcess) {
  const testing::CoveringRows covering =
      testing::covering_rows(testing::kLevels, testing::is_allowed);
  std::set<LevelPair> impossible = {{kOverlap, 1, kClip, 1}, {kOverlap, 2, kClip, 1}};
  for (const int strategy : {0, 1, 2, 3, 4}) {
    impossible.insert({kStrategy, strategy, kShardRanks, 1});
  }
  EXPECT_EQ(covering.impossible, impossible);
  EXPECT_GE(covering.rows.size(), 32u);
  EXPECT_LT(covering.rows.size(), 60u);
  for (std::size_t number = 0; number < covering.rows.size(); ++number) {
    if (testing::kIsSlow && number % 5 != 0) continue;
    const testing::CoveringRow& row = covering.rows[number];
    Training run = testing::training_of(row);
    if (number % 4 == 0) run.delay_seed = 1 + number;
    ASSERT_TRUE(testing::train(run) == testing::one_process(run))
        << "row " << number << ": " << ::testing::PrintToString(row);
  }
}

}  // namespace
}  // namespace tessera::shard

// The choices that no other beats.
#include "tools/compare/pareto.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace tessera::tools {
namespace {

using Choices = std::vector<std::optional<Choice>>;

TEST(Pareto, IsWhatNoOtherBeats) {
  const Choices choices = {Choice{10, 5}, Choice{20, 9}, Choice{20, 8}, Choice{15, 5},
                           Choice{30, 9}, Choice{5, 1},  std::nullopt};
  EXPECT_EQ(pareto_front(choices),
            (std::vector<bool>{true, true, false, false, false, true, false}));
}

TEST(Pareto, EqualsDoNotBeatEachOther) {
  EXPECT_EQ(pareto_front(Choices{Choice{1, 1}, Choice{1, 1}}), (std::vector<bool>{true, true}));
  EXPECT_EQ(pareto_front(Choices{}), std::vector<bool>());
}

}  // namespace
}  // namespace tessera::tools

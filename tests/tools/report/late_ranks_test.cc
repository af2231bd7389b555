// Which rank the others wait for.
#include "tools/report/late_ranks.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::tools {
namespace {

constexpr std::int64_t kMs = 1'000'000;

TEST(LateRanks, AStepHasWhomItsCallsWaitedForLongest) {
  const auto flight = std::make_shared<comm::FlightRecorder>();
  flight->add_group("world", {0, 1, 2});
  flight->met(1, 100 * kMs);  // before the first step
  LateRanks late(flight);
  for (int i = 0; i < 3; ++i) flight->met(1, 2 * kMs);
  flight->met(2, 7 * kMs);
  flight->met(-1, 0);
  EXPECT_EQ(late.step().text(), R"({"late_rank":2,"late_ms":7.0})");
  flight->met(1, 3 * kMs);
  EXPECT_EQ(late.step().text(), R"({"late_rank":1,"late_ms":3.0})");
  flight->met(-1, 0);
  EXPECT_EQ(late.step().text(), "{}");
  EXPECT_EQ(late.num_steps(), 3);
  const std::string text = late.text();
  EXPECT_EQ(text.substr(text.find(' ')), " 7 0 0 4 9000000 1 7000000");
}

TEST(LateRanks, WhoStandsOutIsNamedWithWhoWaitedLongest) {
  const std::vector<std::string> texts = {"h1 100 0 0 0 0 70 50000000",
                                          "h1 100 0 0 0 0 90 82000000",
                                          "h2 100 10 90000000 3 400000 0 0"};
  const auto late = find_late_rank(texts, 20, 40);
  ASSERT_TRUE(late.has_value());
  EXPECT_EQ(late->str(), "rank 1 waited for rank 2 on h2 in 90 % of its calls, 4.1 ms a step");
  EXPECT_EQ(late->record().text(), R"({"late_rank":2,"late_share":0.9,"late_ms":4.1})");
  EXPECT_FALSE(find_late_rank(texts, 20, 100).has_value());  // of 100 ms 4.1 is not much
  const std::vector<std::string> even = {"h1 100 0 0 52 90000000", "h1 100 48 90000000 0 0"};
  EXPECT_FALSE(find_late_rank(even, 20, 40).has_value());
  // Of one process, which has waited for one of them.
  const std::string both = "h1 100 90 82000000 0 0";
  EXPECT_EQ(find_late_rank({{both, both}}, 20, 40)->waiting, 1);
  const std::vector<std::string> none = {"h1 0", "h2 0"};
  EXPECT_FALSE(find_late_rank(none, 20, 40).has_value());
}

}  // namespace
}  // namespace tessera::tools

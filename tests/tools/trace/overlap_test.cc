// Hidden and exposed communication, by hand.
#include "tools/trace/overlap.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::tools {
namespace {

using Intervals = std::vector<Interval>;

TEST(Merge, JoinsWhatTouchesAndLeavesOutWhatIsEmpty) {
  EXPECT_EQ(merge({}), Intervals{});
  EXPECT_EQ(merge({{5, 5}, {7, 6}}), Intervals{});
  EXPECT_EQ(merge({{20, 30}, {0, 10}, {10, 12}, {22, 25}, {31, 32}}),
            (Intervals{{0, 12}, {20, 30}, {31, 32}}));
  EXPECT_EQ(length_ns(merge({{0, 10}, {5, 20}, {-5, -3}})), 22);
}

TEST(Common, CountsMomentsOfBoth) {
  const Intervals a = {{0, 10}, {20, 30}, {40, 50}};
  EXPECT_EQ(common_ns(a, {}), 0);
  EXPECT_EQ(common_ns(a, {{10, 20}, {30, 40}}), 0);
  EXPECT_EQ(common_ns(a, {{5, 45}}), 5 + 10 + 5);
  EXPECT_EQ(common_ns({{5, 45}}, a), 20);
  EXPECT_EQ(common_ns(a, {{1, 2}, {3, 4}, {29, 41}, {49, 99}}), 1 + 1 + 1 + 1 + 1);
}

TEST(CommTimes, OfTwoAtOnceCountOnce) {
  constexpr std::int64_t kMs = 1'000'000;
  // Sent from 0 to 10, and from 5 to 20; computed from 4 to 8 and, twice, from 15 to 30.
  const CommTimes times =
      comm_times({{5 * kMs, 20 * kMs}, {0, 10 * kMs}},
                 {{15 * kMs, 30 * kMs}, {4 * kMs, 8 * kMs}, {16 * kMs, 18 * kMs}});
  EXPECT_DOUBLE_EQ(times.comm_ms, 20);
  EXPECT_DOUBLE_EQ(times.hidden_ms, 9);
  EXPECT_DOUBLE_EQ(times.exposed_ms, 11);
}

TEST(Mean, TakesAKindThatIsMissingAsNothing) {
  Overlap a{.compute_ms = 10, .comm = {4, 3, 1}};
  a.kinds["gradients"] = {3, 1, 2};
  const Overlap b{.compute_ms = 20, .comm = {0, 0, 0}};
  const Overlap mean = mean_of({a, b});
  EXPECT_DOUBLE_EQ(mean.compute_ms, 15);
  EXPECT_DOUBLE_EQ(mean.comm.comm_ms, 2);
  EXPECT_DOUBLE_EQ(mean.kinds.at("gradients").comm_ms, 1.5);
  EXPECT_DOUBLE_EQ(mean.kinds.at("gradients").hidden_ms, 0.5);
  EXPECT_DOUBLE_EQ(mean.kinds.at("gradients").exposed_ms, 1);
  EXPECT_EQ(record_of(mean).text(),
            R"({"compute_ms":15.0,"comm_ms":2.0,"hidden_ms":1.5,"exposed_ms":0.5,"kinds":)"
            R"({"gradients":{"comm_ms":1.5,"hidden_ms":0.5,"exposed_ms":1.0}}})");
  EXPECT_EQ(mean_of({}).comm.comm_ms, 0);
}

}  // namespace
}  // namespace tessera::tools

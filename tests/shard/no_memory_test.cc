// Ranks of a training of which one finds no memory, at every allocation of a step: all end soon
// with an error, nobody waits for the deadline, and the engine holds no byte.
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "comm/flight_recorder.h"
#include "comm/threads.h"
#include "engine/error.h"
#include "tests/shard/toy_training.h"
#include "tests/testing/failing_new.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using testing::fail_new_after;
using testing::Fails;
using testing::Holdings;
using testing::holdings;
using testing::holdings_settled;
using testing::never_fail_new;
using testing::num_news;
using testing::Training;

constexpr auto kPatient = std::chrono::hours(1);  // waiting for it fails the test

// Allocations of a run, and what its ranks end with.
struct Result {
  std::int64_t num_news;
  bool failed;
};

Result run(const Training& training, std::int64_t num_good, Fails fails) {
  const std::int64_t before = num_news();
  fail_new_after(num_good, fails);
  Result result{};
  try {
    const auto flight = std::make_shared<comm::FlightRecorder>();
    comm::run_ranks(training.ranks, {.deadline = kPatient, .flight = flight},
                    [&](comm::ProcessGroup& world) { testing::train_rank(world, training); });
  } catch (const std::bad_alloc&) {
    result.failed = true;
  } catch (const engine::Error&) {  // of a rank that had memory to say what it missed
    result.failed = true;
  }
  result.num_news = num_news() - before;
  never_fail_new();
  return result;
}

TEST(NoMemory, EveryAllocationOfATrainingMayFail) {
  const Training training{.ranks = 3, .steps = 1, .blocks = 1, .numel = 8, .max_norm = 1};
  constexpr std::int64_t kNone = std::int64_t{1} << 60;
  run(training, kNone, Fails::kOne);  // fills what the process keeps
  const std::int64_t all = run(training, kNone, Fails::kOne).num_news;
  const Holdings before = holdings();
  // Every one, or under a sanitizer some, at a distance that has no rhythm with a step's.
  const std::int64_t stride = testing::kIsSlow ? 37 : 1;
  for (const Fails fails : {Fails::kOne, Fails::kAll}) {
    std::int64_t num_failed = 0, num_runs = 0;
    for (std::int64_t n = 0; n < all; n += stride, ++num_runs) {
      num_failed += run(training, n, fails).failed ? 1 : 0;
    }
    // Threads differ a little in what they ask for: the last ones may not come.
    EXPECT_GT(num_failed, num_runs * 9 / 10);
    EXPECT_EQ(holdings_settled(before), before);
  }
  RecordProperty("allocations", std::to_string(all));
  EXPECT_GT(all, 500);
}

}  // namespace
}  // namespace tessera::shard

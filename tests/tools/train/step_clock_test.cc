// The parts that the time of a step is divided into, in simulated time.
#include "tools/train/step_clock.h"

#include <gtest/gtest.h>

#include "engine/meta.h"
#include "engine/stream.h"

namespace tessera::tools {
namespace {

using engine::Stream;

// What a step waits for while it takes its data is no communication.
TEST(StepClock, WaitsForDataAreTimeOfData) {
  const Stream compute = Stream::meta("compute", engine::DeviceKind::kCpu, {.flops_per_s = 1e9});
  const Stream other = compute.sibling("other");
  const auto wait_for_other = [&](double ms) {
    other.wait(compute.record("begin"));
    other.launch({.name = "other", .flops = 1e6 * ms}, [] {});
    compute.wait(other.record("end"));
  };
  StepClock clock(compute);
  wait_for_other(2);
  clock.lap(StepPart::kData);
  wait_for_other(3);
  compute.launch({.name = "work", .flops = 5e6}, [] {});
  clock.lap(StepPart::kCompute);
  const StepClock::Times times = clock.times();
  EXPECT_DOUBLE_EQ(times.data_ms, 2);
  EXPECT_DOUBLE_EQ(times.exposed_comm_ms, 3);
  EXPECT_DOUBLE_EQ(times.compute_ms, 5);
  EXPECT_DOUBLE_EQ(times.step_ms, 10);
}

}  // namespace
}  // namespace tessera::tools

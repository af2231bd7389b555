// The conformance suite on CPU ranks.
#include <gtest/gtest.h>

#include <chrono>

#include "comm/threads.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_threads.h"

namespace tessera::comm {
namespace {

auto backends() {
  return ::testing::Values(Backend{
      .name = "threads", .run = [](int size, milliseconds deadline, const RankFunction& fn) {
        return said_by_threads(
            size, fn, [&](const auto& each) { run_ranks(size, {.deadline = deadline}, each); });
      }});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

}  // namespace
}  // namespace tessera::comm

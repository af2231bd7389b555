// Calls of ranks that differ, where each call is compared before it moves anything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/host_gather.h"
#include "comm/process_group.h"
#include "engine/tensor.h"
#include "tests/comm/process_group_suite.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Some backends cannot.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ComparedCallsTest);

TEST_P(ComparedCallsTest, MismatchNamesBothSidesOnEveryRank) {
  struct Case {
    std::function<void(const Caller&)> most;
    std::function<void(const Caller&)> rank_2;
    std::vector<std::string> expected;
  };
  const Case cases[] = {
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.scatter(8, "h.0"); },
       {"all_gather f32 x 8 'h.0'", "reduce_scatter f32 x 8 'h.0'"}},
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.gather(9, "h.0"); },
       {"all_gather f32 x 8 'h.0'", "all_gather f32 x 9 'h.0'"}},
      {[](const Caller& c) { c.gather(8, "h.0"); },
       [](const Caller& c) { c.gather(8, "h.0", DType::kI32); },
       {"all_gather f32 x 8", "all_gather i32 x 8"}},
      {[](const Caller& c) { c.scatter(8, "h.0"); },
       [](const Caller& c) { c.scatter(8, "h.0", DType::kBF16); },
       {"reduce_scatter f32 x 8", "reduce_scatter bf16 x 8"}},
      {[](const Caller& c) { c.scatter(8, "h.0"); },
       [](const Caller& c) { c.scatter(8, "h.0", DType::kF32, Accumulate::kYes); },
       {"x 8 'h.0'", "x 8 onto a sum 'h.0'"}},
      {[](const Caller& c) { c.reduce(8, "h.0", Accumulate::kNo); },
       [](const Caller& c) { c.reduce(8, "h.0", Accumulate::kYes); },
       {"all_reduce f32 x 8 'h.0'", "all_reduce f32 x 8 onto a sum 'h.0'"}},
      {[](const Caller& c) { c.group.broadcast(c.make(4), 0, c.place.stream, "w"); },
       [](const Caller& c) { c.group.broadcast(c.make(4), 1, c.place.stream, "w"); },
       {"f32 x 4 from rank 0 'w'", "f32 x 4 from rank 1 'w'"}},
      {[](const Caller& c) { c.gather(0, "h.0"); },
       [](const Caller& c) { c.group.barrier("step"); },
       {"all_gather f32 x 0 'h.0'", "barrier 'step'"}},
      {[](const Caller& c) { c.group.split(0, 0); },
       [](const Caller& c) { c.group.barrier("step"); },
       {"split", "barrier 'step'"}},
      {[](const Caller& c) {
         c.gather(8, "h.0");
         c.gather(8, "h.1");
       },
       [](const Caller& c) {
         c.gather(8, "h.1");
         c.gather(8, "h.0");
       },
       {"all_gather f32 x 8 'h.0'", "all_gather f32 x 8 'h.1'"}},
  };
  for (const Case& c : cases) {
    const auto messages = errors(4, [&](ProcessGroup& group) {
      group.barrier("begin");
      (group.rank() == 2 ? c.rank_2 : c.most)(Caller{group, place(group.rank())});
      group.barrier("end");  // for those that need not wait to go on
    });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("#1 of world] expected rank "),
                                     HasSubstr("got rank "), HasSubstr("rank 2's"),
                                     HasSubstr(c.expected[0]), HasSubstr(c.expected[1]))));
    EXPECT_THAT(messages, Each(messages[0]));
  }
}

TEST_P(ComparedCallsTest, AGatherToTheHostTellsOfAFailure) {
  for (const bool waits_in_compute : {false, true}) {
    const auto messages = errors(3, [&](ProcessGroup& group) {
      const auto [compute, memory] = place(group.rank());
      const Stream beside = GetParam().beside(group.rank(), "values", {});
      const Tensor values = Tensor::zeros(memory, {2}, DType::kF32, "values");
      const HostGather gather(group, values, beside, Memory::pinned(compute),
                              group.rank() == 2 ? "loss" : "norm");
      if (waits_in_compute) {
        gather.wait<float>(compute);
      } else {
        gather.wait<float>();
      }
      group.barrier("end");  // for those that need not wait to go on
    });
    EXPECT_THAT(messages, Each(AllOf(HasSubstr("'norm'"), HasSubstr("'loss'"))));
  }
}

}  // namespace
}  // namespace tessera::comm

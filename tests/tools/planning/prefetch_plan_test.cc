// What gathering ahead is worth, in simulated time: where sending takes as long as computing, and
// half as long.
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "tests/tools/testing/gpt_run.h"
#include "tools/planning/planner.h"

namespace tessera::tools {
namespace {

constexpr GptConfig kModel = {.layers = 16, .heads = 4, .dim = 128, .seq = 64, .vocab = 256};

TrainPlan plan_of(int prefetch, shard::BackwardPrefetch backward, double link_bytes_per_s) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = 2;
  config.parallel.strategy = "zero3";
  config.parallel.prefetch = prefetch;
  config.parallel.backward_prefetch = backward;
  config.train.steps = 2;
  config.train.batch = 1;
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  return make_plan(
      config,
      {.num_ranks = 2, .rates = {.link_bytes_per_s = link_bytes_per_s, .link_latency_s = 0}}, model,
      {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}});
}

TrainPlan off(double link_bytes_per_s) {
  return plan_of(0, shard::BackwardPrefetch::kPre, link_bytes_per_s);
}
TrainPlan pre_backward(double link_bytes_per_s) {
  return plan_of(1, shard::BackwardPrefetch::kPre, link_bytes_per_s);
}

double sent_nbytes(const TrainPlan& plan) {
  double sum = 0;
  for (const PlannedCollective& c : plan.collectives) sum += static_cast<double>(c.bytes_sent);
  return sum;
}

// The speed of a link at which sending takes `share` of the time that computing does.
double link_of(double share) {
  const TrainPlan at_once = off(1e18);
  return sent_nbytes(at_once) / (share * at_once.steps[1].step_ms / 1e3);
}

// The first gathers, before which nothing can be computed, and the last reductions, during which
// nothing is left to compute.
bool is_edge(std::string_view label) {
  return label == "root forward" || label == "h.0 forward" || label == "root gradient" ||
         label == "h.0 gradient" || label == "norm";
}

double step_ms(const TrainPlan& plan) { return plan.steps[1].step_ms; }

TEST(PrefetchPlan, WhereSendingTakesAsLongAsComputingAStepIsAQuarterShorter) {
  const double link = link_of(1);
  const TrainPlan without = off(link), with = pre_backward(link);
  EXPECT_LE(step_ms(with), 0.75 * step_ms(without));
  EXPECT_LE(static_cast<double>(peak_nbytes(with)),
            1.1 * static_cast<double>(peak_nbytes(without)));
  const TrainPlan post = plan_of(1, shard::BackwardPrefetch::kPost, link);
  EXPECT_LT(step_ms(post), step_ms(without));
  EXPECT_GT(step_ms(post), step_ms(with));
}

TEST(PrefetchPlan, WhereSendingTakesHalfAsLongItIsHidden) {
  const double link = link_of(0.5);
  const TrainPlan plan = pre_backward(link);
  double sent_ms = 0, exposed_ms = 0;
  for (const PlannedCollective& c : plan.collectives) {
    if (is_edge(c.label)) continue;
    sent_ms += 1e3 * static_cast<double>(c.bytes_sent) / link;
    exposed_ms += c.exposed_ms;
  }
  EXPECT_GT(sent_ms, 0.4 * off(1e18).steps[1].step_ms);
  EXPECT_LE(exposed_ms, 0.05 * sent_ms);
}

}  // namespace
}  // namespace tessera::tools

// A link takes the time that it says, one transfer after the other, and counts what a ring sends.
#include "tools/bench/training/link.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/threads.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::tools {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::Stream;
using engine::Tensor;
using std::chrono::microseconds;

double seconds_of(const auto& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Lower bounds, as a machine may be busy.
TEST(Link, TakesNoLessThanItsBandwidthAndLatency) {
  Link link(1e6, microseconds(20'000));
  EXPECT_GE(seconds_of([&] { link.pass(10'000); }), 0.03);
  Link without(0, microseconds(1'000'000'000));
  without.pass(1e12);
}

TEST(Link, CountsWhatIsToPass) {
  Link link(1e-6);
  link.count(10'000, false);
  EXPECT_EQ(link.nbytes(), 10'000);
  EXPECT_EQ(link.edge_nbytes(), 0);
  link.count(1e12, true);
  EXPECT_EQ(link.nbytes(), 1e12 + 10'000);
  EXPECT_EQ(link.edge_nbytes(), 1e12);
}

// The latency of a transfer passes while the next one runs; its bytes do not.
TEST(Link, CarriesOneTransferAtATimeOfAllStreams) {
  Link link(1e6, microseconds(1000));
  const auto two = [&] {
    std::vector<std::jthread> streams;
    for (int i = 0; i < 2; ++i) {
      streams.emplace_back([&] {
        link.pass(20'000);
        link.pass(20'000);
      });
    }
  };
  EXPECT_GE(seconds_of(two), 0.081);
}

// What a link stood idle for is not made up for.
TEST(Link, HasNoCreditOfIdleTime) {
  Link link(1e6);
  link.pass(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_GE(seconds_of([&] { link.pass(20'000); }), 0.02);
}

TEST(LinkedGroup, CountsWhatARingSends) {
  comm::run_ranks(4, {}, [](ProcessGroup& ranks) {
    Link link(0);
    LinkedGroup world(ranks, link, [](std::string_view label) { return label == "edge"; });
    const Stream stream = Stream::inline_cpu("compute");
    const engine::Memory memory(stream);
    const Tensor part = Tensor::zeros(memory, {25}, DType::kF32);
    const Tensor whole = Tensor::zeros(memory, {100}, DType::kF32);
    world.all_gather(part, whole, stream, "gather");
    EXPECT_EQ(link.nbytes(), 300);
    world.reduce_scatter(whole, part, comm::Accumulate::kNo, stream, "edge");
    EXPECT_EQ(link.nbytes(), 600);
    EXPECT_EQ(link.edge_nbytes(), 300);
    world.all_reduce(whole, whole, comm::Accumulate::kNo, stream, "all");
    EXPECT_EQ(link.nbytes(), 1200);
    // Parts of a group share the link.
    const auto pair = world.split(ranks.rank() / 2, ranks.rank());
    pair->all_gather(part, whole.slice(0, {50}), stream, "pair");
    EXPECT_EQ(link.nbytes(), 1300);
    EXPECT_EQ(link.edge_nbytes(), 300);
  });
}

}  // namespace
}  // namespace tessera::tools

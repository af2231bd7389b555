// Graphs of a GPU: what is captured once and run again and again.
#include "engine/cuda_graph.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

using testing::error_of;

constexpr std::int64_t kNumel = 5000;

// x on the device; a step adds x to `sum` on a stream of its own, by way of a temporary.
class CudaGraphTest : public ::testing::Test {
 protected:
  void set_x(float value) { launch_set(compute_, x_, value, "x"); }
  void step() {
    const Tensor temporary = Tensor::empty(memory_, {kNumel}, DType::kF32, "temporary");
    launch_assign_or_add(compute_, temporary, x_, false, "take", "");
    side_.wait(compute_.record("taken"));
    launch_assign_or_add(side_, sum_, temporary, true, "add", "");
    compute_.wait(side_.record("added"));
  }
  float sum() const {
    const std::vector<float> all = to_vector<float>(sum_);
    EXPECT_EQ(all, std::vector<float>(kNumel, all.front()));
    return all.front();
  }

  const Stream compute_ = Stream::cuda("compute", 0, {.delay_seed = 5});
  const Stream side_ = compute_.sibling("side", {.delay_seed = 6});
  Memory memory_{compute_, {.poison = true}};
  const Tensor x_ = Tensor::zeros(memory_, {kNumel}, DType::kF32);
  const Tensor sum_ = Tensor::zeros(memory_, {kNumel}, DType::kF32);
};

TEST_F(CudaGraphTest, RunsAgainWithWhatMemoryHolds) {
  set_x(1);
  step();
  CudaGraph graph(memory_, {side_}, [&] {
    EXPECT_TRUE(compute_.is_capturing());
    step();
  });
  EXPECT_FALSE(compute_.is_capturing());
  EXPECT_EQ(sum(), 1);  // to capture is not to do
  float expected = 1;
  for (const float x : {10.0f, 100.0f, 1000.0f}) {
    set_x(x);
    graph.launch();
    expected += x;
  }
  EXPECT_EQ(sum(), expected);
}

TEST_F(CudaGraphTest, ItsMemoryIsNobodyElses) {
  set_x(1);
  step();  // its temporary is kept for the next who asks
  std::optional<CudaGraph> graph;
  graph.emplace(memory_, std::vector<Stream>{side_}, [&] { step(); });
  const Tensor mine = Tensor::zeros(memory_, {kNumel}, DType::kF32);
  for (int i = 0; i < 3; ++i) graph->launch();
  EXPECT_EQ(to_vector<float>(mine), std::vector<float>(kNumel));
  EXPECT_EQ(sum(), 4);
  const std::int64_t num_reservations = memory_.stats().num_reservations;
  const Tensor more = Tensor::empty(memory_, {kNumel}, DType::kF32);
  EXPECT_EQ(memory_.stats().num_reservations, num_reservations + 1);
  graph.reset();
  const Tensor again = Tensor::empty(memory_, {kNumel}, DType::kF32);
  EXPECT_EQ(memory_.stats().num_reservations, num_reservations + 1);  // the graph's
}

TEST_F(CudaGraphTest, WhatIsKeptFromACaptureStaysTheGraphs) {
  Tensor kept;
  std::optional<CudaGraph> graph;
  graph.emplace(memory_, std::vector<Stream>{side_}, [&] {
    kept = Tensor::empty(memory_, {kNumel}, DType::kF32, "kept");
    launch_assign_or_add(compute_, kept, x_, false, "keep", "");
  });
  set_x(3);
  graph->launch();
  EXPECT_EQ(to_vector<float>(kept), std::vector<float>(kNumel, 3));
  const std::byte* const address = kept.raw();
  kept = {};
  EXPECT_NE(Tensor::empty(memory_, {kNumel}, DType::kF32).raw(), address);
  graph->launch();
  compute_.synchronize();
  graph.reset();
  const MemoryStats stats = memory_.stats();
  EXPECT_EQ(stats.total_nbytes, 2 * x_.nbytes());
}

TEST_F(CudaGraphTest, ALaunchIsInOrderWithAllItsStreams) {
  set_x(1);
  step();
  CudaGraph graph(memory_, {side_}, [&] { step(); });
  const Tensor read = Tensor::zeros(memory_, {kNumel}, DType::kF32);
  side_.wait(memory_.allocated());
  for (int i = 0; i < 20; ++i) {
    launch_set(side_, sum_, static_cast<float>(i), "before");
    graph.launch();
    launch_assign_or_add(side_, read, sum_, false, "behind");
    side_.synchronize();
    EXPECT_EQ(to_vector<float>(read).front(), static_cast<float>(i + 1));
  }
}

TEST_F(CudaGraphTest, PeaksOfMemoryAreThoseWithout) {
  set_x(1);
  step();
  memory_.reset_peaks();
  step();
  const MemoryStats plain = memory_.stats();
  CudaGraph graph(memory_, {side_}, [&] { step(); });
  for (int i = 0; i < 2; ++i) {
    memory_.reset_peaks();
    EXPECT_LT(memory_.stats().peak_total_nbytes, plain.peak_total_nbytes);
    graph.launch();
    const MemoryStats stats = memory_.stats();
    EXPECT_EQ(stats.peak_nbytes, plain.peak_nbytes);
    EXPECT_EQ(stats.peak_total_nbytes, plain.peak_total_nbytes);
    EXPECT_EQ(stats.current_nbytes, plain.current_nbytes);
  }
}

TEST_F(CudaGraphTest, EventsOfACaptureStandForTheLastLaunch) {
  Event inside;
  set_x(2);
  const Event before = side_.record("before");
  CudaGraph graph(memory_, {side_}, [&] {
    compute_.wait(before);  // done when the capture began
    step();
    inside = side_.record("inside");
    EXPECT_NE(
        error_of<InvalidArgument>([&] { static_cast<void>(inside.reached()); }).find("inside"),
        std::string::npos);
  });
  EXPECT_TRUE(inside.reached());  // nothing was launched
  const Stream other = compute_.sibling("other");
  for (int i = 1; i <= 2; ++i) {
    graph.launch();
    other.wait(inside);
    const Tensor copied = Tensor::empty(Memory::pinned(compute_), {kNumel}, DType::kF32);
    copy(copied, sum_, other);
    other.synchronize();
    EXPECT_EQ(copied.span<float>().front(), 2.0f * static_cast<float>(i));
    inside.wait();
    EXPECT_TRUE(inside.reached());
  }
}

// What waits for it stands still until somebody opens it.
class Gate {
 public:
  Event event() {
    host_.launch({.name = "gate"}, [opened = opened_.get_future().share()] { opened.wait(); });
    return host_.record("gate");
  }
  /// Opens after a while, in which `event` must not be reached.
  void open_before(const Event& event) {
    for (int i = 0; i < 50 && !event.reached(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_FALSE(event.reached());
    opened_.set_value();
  }

 private:
  std::promise<void> opened_;
  Stream host_ = Stream::worker_cpu("host");
};

TEST_F(CudaGraphTest, ALaunchWaitsForWorkOfItsOtherStreams) {
  set_x(1);
  step();
  CudaGraph graph(memory_, {side_}, [&] { step(); });
  Gate gate;
  side_.wait(gate.event());
  launch_set(side_, sum_, 10, "late");
  graph.launch();
  gate.open_before(compute_.record("done"));
  EXPECT_EQ(sum(), 11);
}

// Of a stream that is not the graph's, and still at work when it is captured.
TEST_F(CudaGraphTest, TheFirstLaunchWaitsForWhatTheCaptureTookForReached) {
  set_x(1);
  step();
  Gate gate;
  const Stream other = compute_.sibling("other");
  other.wait(compute_.record("stepped"));
  other.wait(gate.event());
  launch_set(other, x_, 10, "late");
  const Event late = other.record("late");
  CudaGraph graph(memory_, {side_}, [&] {
    compute_.wait(late);
    step();
  });
  graph.launch();
  gate.open_before(compute_.record("done"));
  EXPECT_EQ(sum(), 11);
}

TEST_F(CudaGraphTest, RefusesWhatAGraphCannotHold) {
  const auto error_in = [&](const std::function<void()>& fn) {
    return error_of<Error>([&] { CudaGraph(memory_, {side_}, fn); });
  };
  EXPECT_NE(error_in([&] { compute_.synchronize(); }).find("'compute'"), std::string::npos);
  EXPECT_NE(error_in([&] { static_cast<void>(x_.slice(0, {1}).item()); }).find("[graph]"),
            std::string::npos);
  const Stream other = compute_.sibling("other");
  EXPECT_NE(error_in([&] { compute_.wait(other.record("theirs")); }).find("'theirs'"),
            std::string::npos);
  EXPECT_NE(error_in([&] { other.wait(compute_.record("ours")); }).find("'ours'"),
            std::string::npos);
  const Stream host = Stream::worker_cpu("host");
  EXPECT_NE(error_in([&] { compute_.wait(host.record("cpu")); }).find("the host"),
            std::string::npos);
  EXPECT_NE(error_of<InvalidArgument>([&] { CudaGraph(Memory(), {}, [] {}); }).find("cpu"),
            std::string::npos);
  struct Listener final : LaunchListener {
    void on_launch(const LaunchRecord&) noexcept override {}
  } listener;
  const Stream heard = compute_.sibling("heard", {.listener = &listener});
  EXPECT_NE(error_of<InvalidArgument>([&] {
              CudaGraph(memory_, {side_, heard}, [] {});
            }).find("'heard'"),
            std::string::npos);
  // All of it is as before.
  set_x(1);
  step();
  EXPECT_EQ(sum(), 1);
  CudaGraph graph(memory_, {side_}, [&] { step(); });
  graph.launch();
  EXPECT_EQ(sum(), 2);
}

TEST_F(CudaGraphTest, ErrorsOfWhatIsCapturedGoThrough) {
  EXPECT_THROW(CudaGraph(memory_, {side_},
                         [&] {
                           step();
                           throw std::runtime_error("mine");
                         }),
               std::runtime_error);
  set_x(1);
  step();
  EXPECT_EQ(sum(), 1);
  EXPECT_EQ(memory_.stats().total_nbytes, 2 * x_.nbytes());
}

}  // namespace
}  // namespace tessera::engine

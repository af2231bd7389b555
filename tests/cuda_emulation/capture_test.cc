// Captures and graphs of the emulated CUDA runtime: what they do, and what they refuse.
#include "tests/cuda_emulation/runtime_testing.h"

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace tessera::cuda_emulation {
namespace {

constexpr auto kThreadLocal = cudaStreamCaptureModeThreadLocal;
constexpr auto kRelaxed = cudaStreamCaptureModeRelaxed;

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(stream, &status));
  return status;
}

class CudaEmulationCapture : public CudaEmulationStreams {
 protected:
  void TearDown() override {
    if (exec_ != nullptr) check(cudaGraphExecDestroy(exec_));
    if (graph_ != nullptr) check(cudaGraphDestroy(graph_));
    cudaGetLastError();
    CudaEmulationStreams::TearDown();
  }
  void add(cudaStream_t stream, int value) {
    check(launch(stream, x_, [=](int* x) { *x = *x * 10 + value; }));
  }
  void fork() {
    check(cudaEventRecord(event_, a_));
    check(cudaStreamWaitEvent(b_, event_, 0));
  }
  void join() {
    check(cudaEventRecord(event_, b_));
    check(cudaStreamWaitEvent(a_, event_, 0));
  }
  void end() {
    check(cudaStreamEndCapture(a_, &graph_));
    check(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  /// The capture is spoilt, and its end leaves a stream that works.
  void expect_spoilt(const std::string& by) {
    EXPECT_EQ(status_of(a_), cudaStreamCaptureStatusInvalidated) << by;
    EXPECT_EQ(cudaMemsetAsync(x_, 0, sizeof(int), a_), cudaErrorStreamCaptureInvalidated) << by;
    EXPECT_EQ(cudaStreamEndCapture(a_, &graph_), cudaErrorStreamCaptureInvalidated) << by;
    EXPECT_EQ(graph_, nullptr);
    EXPECT_EQ(status_of(a_), cudaStreamCaptureStatusNone);
    check(cudaMemsetAsync(x_, 0, sizeof(int), a_));
    EXPECT_EQ(read(a_, x_), 0);
    cudaGetLastError();
  }
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

TEST_F(CudaEmulationCapture, NothingRunsBeforeTheLaunchAndThenEachTime) {
  int* host = new_pinned<int>(1);
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  EXPECT_EQ(status_of(a_), cudaStreamCaptureStatusActive);
  EXPECT_EQ(status_of(b_), cudaStreamCaptureStatusNone);
  add(a_, 1);
  check(cudaMemcpyAsync(host, x_, sizeof(int), cudaMemcpyDeviceToHost, a_));
  end();
  EXPECT_EQ(read(a_, x_), 0);
  start_counting();
  for (const int expected : {1, 11, 111}) {
    check(cudaGraphLaunch(exec_, a_));
    check(cudaStreamSynchronize(a_));
    EXPECT_EQ(*host, expected);
  }
  EXPECT_EQ(calls().graph_launches, 3);
  EXPECT_EQ(calls().launches, 0);
  EXPECT_EQ(calls().copies, 0);
  check(cudaFreeHost(host));
}

TEST_F(CudaEmulationCapture, BranchesAreOrderedByTheirWaits) {
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  set_late(a_, 1);
  fork();
  add(b_, 2);
  join();
  add(a_, 3);
  end();
  check(cudaGraphLaunch(exec_, b_));  // any stream, which orders it
  check(cudaEventRecord(event_, b_));
  check(cudaStreamWaitEvent(a_, event_, 0));
  add(a_, 4);
  EXPECT_EQ(read(a_, x_), 1234);
}

TEST_F(CudaEmulationCapture, BranchesRunSideBySide) {
  std::atomic<bool> a_runs = false, b_runs = false;
  const auto meet = [](std::atomic<bool>& mine, std::atomic<bool>& other) {
    mine = true;
    while (!other) std::this_thread::yield();
  };
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  fork();
  check(enqueue(a_, "a", [&] { meet(a_runs, b_runs); }));
  check(enqueue(b_, "b", [&] { meet(b_runs, a_runs); }));
  join();
  end();
  check(cudaGraphLaunch(exec_, a_));
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
}

TEST_F(CudaEmulationCapture, AGraphOutlivesWhatItWasMadeOf) {
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  add(a_, 1);
  end();
  check(cudaGraphDestroy(std::exchange(graph_, nullptr)));
  check(cudaGraphLaunch(exec_, a_));
  check(cudaGraphLaunch(exec_, a_));
  check(cudaGraphExecDestroy(std::exchange(exec_, nullptr)));  // with work pending
  EXPECT_EQ(read(a_, x_), 11);
}

TEST_F(CudaEmulationCapture, WhatLooksAtAStreamOrAnEventSpoilsIt) {
  int* host = new_pinned<int>(1);
  int pageable = 0;
  void* address = nullptr;
  const cudaEvent_t earlier = new_event();
  check(cudaEventRecord(earlier, b_));
  check(cudaStreamSynchronize(b_));
  struct Case {
    std::string name;
    cudaError_t expected;
    std::function<cudaError_t()> call;
  };
  const std::vector<Case> cases = {
      {"stream synchronize", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaStreamSynchronize(a_); }},
      {"stream query", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(a_); }},
      {"event query", cudaErrorCapturedEvent, [&] { return cudaEventQuery(event_); }},
      {"event synchronize", cudaErrorCapturedEvent, [&] { return cudaEventSynchronize(event_); }},
      {"query of an earlier event", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaEventQuery(earlier); }},
      {"wait for an earlier event", cudaErrorStreamCaptureIsolation,
       [&] { return cudaStreamWaitEvent(a_, earlier, 0); }},
      {"device synchronize", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaDeviceSynchronize(); }},
      {"another stream's synchronize", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaStreamSynchronize(b_); }},
      {"malloc", cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&address, 256); }},
      {"malloc of the host", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaMallocHost(&address, 256); }},
      {"free", cudaErrorStreamCaptureUnsupported, [&] { return cudaFree(x_); }},
      {"free of the host", cudaErrorStreamCaptureUnsupported, [&] { return cudaFreeHost(host); }},
      {"copy of the null stream", cudaErrorStreamCaptureImplicit,
       [&] { return cudaMemcpy(host, x_, sizeof(int), cudaMemcpyDeviceToHost); }},
      {"fill of the null stream", cudaErrorStreamCaptureImplicit,
       [&] { return cudaMemset(x_, 0, sizeof(int)); }},
      {"copy from pageable memory", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaMemcpyAsync(x_, &pageable, sizeof(int), cudaMemcpyHostToDevice, a_); }},
      {"destruction", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamDestroy(a_); }},
  };
  for (const Case& c : cases) {
    check(cudaStreamBeginCapture(a_, kThreadLocal));
    check(cudaEventRecord(event_, a_));
    EXPECT_EQ(c.call(), c.expected) << c.name;
    expect_spoilt(c.name);
  }
  check(cudaEventDestroy(earlier));
  check(cudaFreeHost(host));
}

TEST_F(CudaEmulationCapture, WhatIsOnlyUnsafeGoesWhereItIsAllowed) {
  void* address = nullptr;
  check(cudaStreamBeginCapture(a_, kRelaxed));
  EXPECT_EQ(cudaMalloc(&address, 256), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);  // not recorded
  check(cudaStreamEndCapture(a_, &graph_));
  check(cudaGraphDestroy(std::exchange(graph_, nullptr)));

  check(cudaStreamBeginCapture(a_, kThreadLocal));
  cudaStreamCaptureMode mode = kRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaFree(address), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  // Other threads are free.
  std::thread([&] {
    EXPECT_EQ(cudaMalloc(&address, 256), cudaSuccess);
    EXPECT_EQ(cudaFree(address), cudaSuccess);
  }).join();
  add(a_, 1);
  end();
  check(cudaGraphLaunch(exec_, a_));
  EXPECT_EQ(read(a_, x_), 1);
  check(cudaMalloc(&address, 256));  // after the end
  check(cudaFree(address));
}

TEST_F(CudaEmulationCapture, StreamsMustBeJoined) {
  for (const bool has_work : {true, false}) {
    check(cudaStreamBeginCapture(a_, kThreadLocal));
    fork();
    EXPECT_EQ(status_of(b_), cudaStreamCaptureStatusActive);
    if (has_work) add(b_, 1);
    EXPECT_EQ(cudaStreamEndCapture(a_, &graph_), cudaErrorStreamCaptureUnjoined);
    EXPECT_EQ(graph_, nullptr);
    EXPECT_EQ(status_of(b_), cudaStreamCaptureStatusNone);
  }
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  fork();
  join();
  add(b_, 1);  // after the join
  EXPECT_EQ(cudaStreamEndCapture(a_, &graph_), cudaErrorStreamCaptureUnjoined);
  cudaGetLastError();
  add(b_, 5);
  EXPECT_EQ(read(b_, x_), 5);
}

TEST_F(CudaEmulationCapture, EventsOfACaptureEndWithIt) {
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  check(cudaEventRecord(event_, a_));
  end();
  EXPECT_EQ(cudaStreamWaitEvent(b_, event_, 0), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorCapturedEvent);
  check(cudaEventRecord(event_, a_));
  EXPECT_EQ(cudaStreamWaitEvent(b_, event_, 0), cudaSuccess);
}

TEST_F(CudaEmulationCapture, TwoCapturesStayApart) {
  const cudaEvent_t of_b = new_event();
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  check(cudaStreamBeginCapture(b_, kThreadLocal));
  EXPECT_EQ(cudaStreamBeginCapture(b_, kThreadLocal), cudaErrorIllegalState);
  check(cudaEventRecord(of_b, b_));
  EXPECT_EQ(cudaStreamWaitEvent(a_, of_b, 0), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(cudaStreamEndCapture(b_, &graph_), cudaErrorStreamCaptureInvalidated);
  expect_spoilt("merge");
  check(cudaEventDestroy(of_b));
}

TEST_F(CudaEmulationCapture, TheEndComesFromWhereItBegan) {
  EXPECT_EQ(cudaStreamEndCapture(a_, &graph_), cudaErrorIllegalState);
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  std::thread([&] {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(a_, &graph), cudaErrorStreamCaptureWrongThread);
  }).join();
  fork();
  EXPECT_EQ(cudaStreamEndCapture(b_, &graph_), cudaErrorStreamCaptureUnmatched);
  EXPECT_EQ(cudaStreamEndCapture(a_, &graph_), cudaErrorStreamCaptureInvalidated);
  cudaGetLastError();
}

TEST_F(CudaEmulationCapture, AMissingWaitInAGraphIsARace) {
  check(cudaStreamBeginCapture(a_, kThreadLocal));
  fork();
  set_late(a_, 1);
  set_late(b_, 2);
  join();
  end();
  expect_race([&] {
    check(cudaGraphLaunch(exec_, a_));
    check(cudaStreamSynchronize(a_));
  });
}

}  // namespace
}  // namespace tessera::cuda_emulation

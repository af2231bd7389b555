// Streams, events, devices and launches of the emulated CUDA runtime.
#include "tests/cuda_emulation/runtime_testing.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::cuda_emulation {
namespace {

// Streams and events.

TEST_F(CudaEmulationStreams, StreamRunsInOrderWhileTheHostGoesOn) {
  set_late(a_, 1, 20);
  EXPECT_EQ(cudaStreamQuery(a_), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  check(launch(a_, x_, [](int* x) { *x = *x * 10 + 2; }));
  EXPECT_EQ(read(a_, x_), 12);
  EXPECT_EQ(cudaStreamQuery(a_), cudaSuccess);
}

TEST_F(CudaEmulationStreams, StreamWaitsForTheRecordOfThatTime) {
  set_late(a_, 1);
  check(cudaEventRecord(event_, a_));
  check(cudaStreamWaitEvent(b_, event_, 0));
  EXPECT_EQ(read(b_, x_), 1);  // does not wait for the record that follows
  std::atomic<bool> free = false;
  check(enqueue(a_, "hold", [&] {
    while (!free) std::this_thread::yield();
  }));
  check(cudaStreamWaitEvent(b_, event_, 0));
  check(cudaEventRecord(event_, a_));
  EXPECT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  free = true;
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  cudaGetLastError();
}

TEST_F(CudaEmulationStreams, WaitForAnEventNeverRecordedIsNone) {
  check(cudaStreamWaitEvent(a_, event_, 0));
  check(cudaEventSynchronize(event_));
  check(cudaEventQuery(event_));
  check(cudaStreamSynchronize(a_));
}

TEST_F(CudaEmulation, StreamsAndEventsCanGoWithWorkPending) {
  const cudaStream_t a = new_stream();
  const cudaStream_t b = new_stream();
  const cudaEvent_t event = new_event();
  std::atomic<int> order = 0;
  check(enqueue(a, "slow", [&] {
    sleep_ms(10);
    order = 1;
  }));
  check(cudaEventRecord(event, a));
  check(cudaStreamWaitEvent(b, event, 0));
  check(enqueue(b, "after", [&] { order = order == 1 ? 2 : 3; }));
  check(cudaEventDestroy(event));
  check(cudaStreamDestroy(a));
  check(cudaStreamSynchronize(b));
  EXPECT_EQ(order, 2);
  check(cudaStreamDestroy(b));
  EXPECT_EQ(cudaStreamSynchronize(b), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event, b), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaEmulationStreams, EventsTellTheTimeOnlyIfAsked) {
  const cudaEvent_t begin = new_event(cudaEventDefault);
  const cudaEvent_t end = new_event(cudaEventDefault);
  check(cudaEventRecord(begin, a_));
  set_late(a_, 1, 10);
  check(cudaEventRecord(end, a_));
  check(cudaEventRecord(event_, a_));
  check(cudaStreamSynchronize(a_));
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end));
  EXPECT_GE(ms, 10);
  EXPECT_EQ(cudaEventElapsedTime(&ms, begin, event_), cudaErrorInvalidResourceHandle);
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
}

TEST_F(CudaEmulationStreams, HostFunctionsRunInOrderAndMayNotCallCuda) {
  set_late(a_, 7);
  struct Seen {
    int* x;
    int value;
    cudaError_t error;
  } seen{storage_of(x_), 0, cudaSuccess};
  check(cudaLaunchHostFunc(
      a_,
      [](void* data) {
        auto* seen = static_cast<Seen*>(data);
        seen->value = *seen->x;
        seen->error = cudaDeviceSynchronize();
      },
      &seen));
  check(cudaStreamSynchronize(a_));
  EXPECT_EQ(seen.value, 7);
  EXPECT_EQ(seen.error, cudaErrorNotPermitted);
}

TEST_F(CudaEmulation, WorkersEndWithTheirStreams) {
  const auto num_threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  for (int i = 0; i < 50; ++i) {
    const cudaStream_t stream = new_stream();
    check(enqueue(stream, "work", [] {}));
    check(cudaStreamDestroy(stream));
  }
  for (int i = 0; i < 1000 && num_threads() > 25; ++i) sleep_ms(5);
  EXPECT_LE(num_threads(), 25);
}

TEST_F(CudaEmulation, OnlyNonBlockingStreams) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamDefault), cudaErrorNotSupported);
  EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 4, nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(enqueue(nullptr, "x", [] {}), cudaErrorInvalidResourceHandle);
}

TEST_F(CudaEmulationStreams, HostThatFeedsTwoStreamsInTurnDoesNotOrderThem) {
  expect_race([&] {
    check(launch(a_, x_, [](int* x) { *x = 1; }));
    sleep_ms(2);  // late enough never to overlap
    check(launch(b_, x_, [](int* x) { *x = 2; }));
    check(cudaDeviceSynchronize());
  });
}

TEST_F(CudaEmulationStreams, HostsWritesAreSeenByLaterLaunchesAlone) {
  int* pinned = new_pinned<int>(1);
  *pinned = 1;
  expect_race([&] {
    check(enqueue(a_, "slow", [] { sleep_ms(5); }));
    check(launch(a_, x_, [pinned](int* x) { *x = *pinned; }));
    *pinned = 2;
    check(launch(a_, x_, [](int*) {}));
    check(cudaStreamSynchronize(a_));
  });
  check(cudaFreeHost(pinned));
}

TEST_F(CudaEmulationStreams, EventOrdersNothingThatFollowsIt) {
  expect_race([&] {
    check(launch(a_, x_, [](int* x) { *x = 3; }));
    check(cudaEventRecord(event_, a_));
    check(launch(a_, x_, [](int* x) { *x = 4; }));
    check(cudaStreamWaitEvent(b_, event_, 0));
    sleep_ms(2);
    check(launch(b_, x_, [](int* x) { *x = 5; }));
    check(cudaEventSynchronize(event_));
    check(cudaDeviceSynchronize());
  });
}

TEST_F(CudaEmulationStreams, FreeingOrdersNothing) {
  expect_race([&] {
    check(launch(a_, x_, [](int* x) { *x = 1; }));
    int* y = new_device<int>(1);
    check(cudaFree(y));  // waits for the device, as long as the driver likes to
    check(launch(b_, x_, [](int* x) { *x = 2; }));
    check(cudaDeviceSynchronize());
  });
}

TEST_F(CudaEmulationStreams, QueriesOfTimesOrderNothing) {
  const cudaEvent_t timed = new_event(cudaEventDefault);
  expect_race([&] {
    check(launch(a_, x_, [](int* x) { *x = 1; }));
    check(cudaEventRecord(timed, a_));
    while (cudaEventQuery(timed) != cudaSuccess) sleep_ms(1);
    check(launch(b_, x_, [](int* x) { *x = 2; }));
    check(cudaDeviceSynchronize());
  });
  check(cudaEventDestroy(timed));
  cudaGetLastError();
}

TEST_F(CudaEmulationStreams, QueriesThatSayDoneOrder) {
  set_late(a_, 1);
  check(cudaEventRecord(event_, a_));
  while (cudaEventQuery(event_) != cudaSuccess) sleep_ms(1);
  check(launch(b_, x_, [](int* x) { ++*x; }));
  while (cudaStreamQuery(b_) != cudaSuccess) sleep_ms(1);
  EXPECT_EQ(*storage_of(x_), 2);
  cudaGetLastError();
}

// Devices and launches.

TEST_F(CudaEmulation, EachThreadHasItsDevice) {
  int count = 0;
  check(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 8);
  EXPECT_EQ(cudaSetDevice(8), cudaErrorInvalidDevice);
  check(cudaSetDevice(3));
  std::thread([] {
    int device = -1;
    check(cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
  }).join();
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 3));
  EXPECT_EQ(properties.major, 9);
  EXPECT_EQ(properties.sharedMemPerBlockOptin, 227U << 10);
  configure({.num_devices = 0});
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorNoDevice);
}

TEST_F(CudaEmulationStreams, LaunchesAreCheckedAsOnTheDevice) {
  const auto error = [&](KernelLaunch shape) {
    return launch(
        a_, x_, [](int*) {}, shape);
  };
  static const int kernel = 0;
  EXPECT_EQ(error({.block = dim3(1024)}), cudaSuccess);
  EXPECT_EQ(error({.block = dim3(1025)}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error({.block = dim3(1, 1, 65)}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error({.block = dim3(64, 32)}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error({.grid = dim3(0)}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error({.grid = dim3(1, 65536)}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(error({.kernel = &kernel, .shared_nbytes = 48 << 10}), cudaSuccess);
  EXPECT_EQ(error({.kernel = &kernel, .shared_nbytes = 100 << 10}), cudaErrorInvalidValue);
  constexpr auto kMax = cudaFuncAttributeMaxDynamicSharedMemorySize;
  check(cudaFuncSetAttribute(&kernel, kMax, 100 << 10));
  EXPECT_EQ(error({.kernel = &kernel, .shared_nbytes = 100 << 10}), cudaSuccess);
  EXPECT_EQ(cudaFuncSetAttribute(&kernel, kMax, 228 << 10), cudaErrorInvalidValue);
  check(cudaSetDevice(1));  // the attribute is of one device, the stream of another
  EXPECT_EQ(error({}), cudaErrorInvalidResourceHandle);
  const cudaStream_t other = new_stream();
  EXPECT_EQ(launch(other, x_, [](int*) {}, {.kernel = &kernel, .shared_nbytes = 100 << 10}),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaEventRecord(event_, other), cudaErrorInvalidResourceHandle);
  check(cudaStreamDestroy(other));
}

TEST_F(CudaEmulationStreams, KernelsReachOtherDevicesOnlyWithPeerAccess) {
  check(cudaSetDevice(1));
  const cudaStream_t other = new_stream();
  check(cudaDeviceEnablePeerAccess(0, 0));
  EXPECT_EQ(cudaDeviceEnablePeerAccess(0, 0), cudaErrorPeerAccessAlreadyEnabled);
  check(launch(other, x_, [](int* x) { *x = 9; }));
  check(cudaStreamSynchronize(other));
  EXPECT_EQ(read(a_, x_), 9);
  check(cudaDeviceDisablePeerAccess(0));
  check(launch(other, x_, [](int* x) { *x = 10; }));
  EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorIllegalAddress);
  EXPECT_EQ(fault(1), "test_kernel: memory of a device without peer access");
  reset();
  check(cudaStreamDestroy(other));
}

TEST_F(CudaEmulationStreams, PointersToPageableMemoryBreakTheDevice) {
  int* pinned = new_pinned<int>(1);
  int host = 0;
  for (const int* fine : {static_cast<int*>(nullptr), x_, pinned}) check_pointer_argument(fine);
  check(launch(a_, x_, [](int*) {}));
  check(cudaStreamSynchronize(a_));
  check_pointer_argument(&host);
  check(launch(a_, x_, [](int*) { ADD_FAILURE(); }));
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaErrorIllegalAddress);
  EXPECT_EQ(fault(0), "test_kernel: an argument points to pageable host memory");
  reset();
  check(cudaFreeHost(pinned));
}

TEST_F(CudaEmulationStreams, FailedLaunchSticksToItsDevice) {
  fail_launch(/*device=*/0, /*nth=*/2);
  set_late(a_, 1);
  check(launch(a_, x_, [](int* x) { *x = 2; }));  // fails when it runs
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(launch(b_, x_, [](int*) {}), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventRecord(event_, a_), cudaErrorLaunchFailure);
  void* y = nullptr;
  EXPECT_EQ(cudaMalloc(&y, 4), cudaErrorLaunchFailure);
  EXPECT_EQ(fault(0), "test_kernel: failed on demand");
  check(cudaSetDevice(1));
  const cudaStream_t other = new_stream();
  check(cudaStreamDestroy(other));
  reset();
  check(cudaSetDevice(0));
  EXPECT_EQ(read(a_, x_), 1);  // as the last launch that did not fail left it
}

TEST_F(CudaEmulationStreams, HostLearnsOfAFaultWhenNothingRunsOnTheDevice) {
  const auto wait_for_event = [&] { return cudaEventSynchronize(event_); };
  const auto wait_for_stream = [&] { return cudaStreamSynchronize(a_); };
  const auto wait_for_device = [] { return cudaDeviceSynchronize(); };
  for (const auto& wait : {std::function(wait_for_event), std::function(wait_for_stream),
                           std::function(wait_for_device)}) {
    std::atomic<bool> begun = false;
    int written = 0;
    check(launch(a_, x_, [&](int*) {
      begun = true;
      sleep_ms(50);
      written = 1;
    }));
    check(cudaEventRecord(event_, a_));
    while (!begun) std::this_thread::yield();
    fail_launch(/*device=*/0, /*nth=*/1);
    check(launch(b_, x_, [](int*) {}));
    EXPECT_EQ(cudaStreamSynchronize(b_), cudaErrorLaunchFailure);
    EXPECT_EQ(wait(), cudaErrorLaunchFailure);
    EXPECT_EQ(written, 1);
    reset();
  }
}

TEST_F(CudaEmulationStreams, WhatAKernelThrowsBreaksTheDevice) {
  std::atomic<bool> free = false;
  check(launch(a_, x_, [&](int*) {
    while (!free) std::this_thread::yield();
    throw std::runtime_error("threads at different barriers");
  }));
  check(enqueue(a_, "skipped", [] { ADD_FAILURE(); }));
  check(cudaEventRecord(event_, a_));
  free = true;
  EXPECT_EQ(cudaEventSynchronize(event_), cudaErrorLaunchFailure);
  EXPECT_EQ(fault(0), "test_kernel: threads at different barriers");
}

TEST_F(CudaEmulationStreams, ThreadOrderIsAFunctionOfTheSeed) {
  std::vector<std::uint64_t> seeds;
  for (const std::uint64_t setting : {0, 1, 1, 2}) {
    Settings chosen = settings();
    chosen.permutation_seed = setting;
    configure(chosen);
    KernelLaunch shape{.name = "k"};
    shape.run_grid = [&](std::uint64_t seed) { seeds.push_back(seed); };
    check(enqueue_kernel(a_, shape));
    check(cudaStreamSynchronize(a_));
  }
  EXPECT_EQ(seeds[0], 0U);
  EXPECT_EQ(seeds[1], seeds[2]);
  EXPECT_NE(seeds[1], seeds[3]);
}

TEST_F(CudaEmulationStreams, DelaysChangeNoResult) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Settings chosen = settings();
    chosen.delay_seed = seed;
    configure(chosen);
    check(cudaMemsetAsync(x_, 0, sizeof(int), a_));
    for (int i = 0; i < 10; ++i) {
      for (const auto& [from, to] : {std::pair(a_, b_), std::pair(b_, a_)}) {
        check(cudaEventRecord(event_, from));
        check(cudaStreamWaitEvent(to, event_, 0));
        check(launch(to, x_, [](int* x) { ++*x; }));
      }
    }
    EXPECT_EQ(read(a_, x_), 20);
  }
}

}  // namespace
}  // namespace tessera::cuda_emulation

// What the tests of the emulated runtime share. It watches ThreadSanitizer, so a program may have
// one source that includes it.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <utility>

#include "tests/emulator/control.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
inline std::atomic<int> num_races = 0;
inline std::atomic<bool> races_expected = false;
}  // namespace tessera::cuda_emulation

#ifdef TESSERA_EMULATION_TSAN
constexpr bool kSeesRaces = true;
extern "C" const char* __tsan_default_options() {
  return "suppress_equal_stacks=0:suppress_equal_addresses=0";
}
// ThreadSanitizer's hook: whether to keep a report to ourselves.
namespace __tsan {
struct ReportDesc;
bool OnReport(const ReportDesc*, bool suppressed) {
  if (!tessera::cuda_emulation::races_expected.load(std::memory_order_relaxed)) return suppressed;
  tessera::cuda_emulation::num_races.fetch_add(1, std::memory_order_relaxed);
  return true;
}
}  // namespace __tsan
#else
constexpr bool kSeesRaces = false;
#endif

namespace tessera::cuda_emulation {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorName(error));
}

inline cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

inline cudaEvent_t new_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, flags));
  return event;
}

template <class T>
T* new_device(std::size_t numel) {
  void* address = nullptr;
  check(cudaMalloc(&address, numel * sizeof(T)));
  return static_cast<T*>(address);
}

template <class T>
T* new_pinned(std::size_t numel) {
  void* address = nullptr;
  check(cudaMallocHost(&address, numel * sizeof(T)));
  return static_cast<T*>(address);
}

/// A kernel of one block of one thread, that calls `fn` with the storage of `address`.
template <class T, class F>
cudaError_t launch(cudaStream_t stream, T* address, F fn, KernelLaunch shape = {}) {
  struct {
    T* address;
  } arguments{address};
  translate_arguments(&arguments, sizeof arguments);
  if (shape.name.empty()) shape.name = "test_kernel";
  shape.run_grid = [=](std::uint64_t) { fn(arguments.address); };
  return enqueue_kernel(stream, std::move(shape));
}

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

template <class T>
T read(cudaStream_t stream, const T* address) {
  T value{};
  check(cudaMemcpyAsync(&value, address, sizeof value, cudaMemcpyDeviceToHost, stream));
  return value;
}

/// Nothing left from the test before, nothing left after.
class CudaEmulation : public testing::Test {
 protected:
  void SetUp() override {
    reset();
    cudaSetDevice(0);
    cudaGetLastError();
    before_ = live();
  }
  void TearDown() override {
    reset();
    EXPECT_EQ(live(), before_);
  }
  /// Runs `fn`, in which ThreadSanitizer, if it watches, sees a race.
  template <class F>
  static void expect_race(F fn) {
    num_races = 0;
    races_expected = true;
    fn();
    races_expected = false;
    EXPECT_EQ(num_races > 0, kSeesRaces);
  }
  Live before_;
};

/// Two streams, an event, and a number in device memory.
class CudaEmulationStreams : public CudaEmulation {
 protected:
  void SetUp() override {
    CudaEmulation::SetUp();
    a_ = new_stream();
    b_ = new_stream();
    event_ = new_event();
    x_ = new_device<int>(1);
    check(cudaMemsetAsync(x_, 0, sizeof(int), a_));
    check(cudaStreamSynchronize(a_));
  }
  void TearDown() override {
    reset();
    check(cudaFree(x_));
    check(cudaEventDestroy(event_));
    check(cudaStreamDestroy(a_));
    check(cudaStreamDestroy(b_));
    CudaEmulation::TearDown();
  }
  void set_late(cudaStream_t stream, int value, int ms = 5) {
    check(launch(stream, x_, [=](int* x) {
      sleep_ms(ms);
      *x = value;
    }));
  }
  cudaStream_t a_ = nullptr;
  cudaStream_t b_ = nullptr;
  cudaEvent_t event_ = nullptr;
  int* x_ = nullptr;
};

/// Each death happens in a process of its own: a forked one would have no stream workers.
class CudaEmulationDeathTest : public CudaEmulation {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    CudaEmulation::SetUp();
  }
};

}  // namespace tessera::cuda_emulation

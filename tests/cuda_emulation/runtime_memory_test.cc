// Memory and copies of the emulated CUDA runtime.
#include "tests/cuda_emulation/runtime_testing.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::cuda_emulation {
namespace {

// Memory.

TEST_F(CudaEmulationStreams, FreshDeviceMemoryIsNaN) {
  float* y = new_device<float>(3);
  EXPECT_TRUE(std::isnan(read(a_, y + 2)));
  check(cudaFree(y));
}

TEST_F(CudaEmulation, DeviceMemoryIsAlignedAsPromisedAndNoMore) {
  std::vector<char*> all;
  for (int i = 1; i <= 5; ++i) {
    all.push_back(new_device<char>(static_cast<std::size_t>(i) * 300));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(all.back()) % 256, 0U);
  }
  EXPECT_NE(reinterpret_cast<std::uintptr_t>(all[0]) % 4096, 0U);
  for (char* each : all) check(cudaFree(each));
}

TEST_F(CudaEmulation, PointersTellWhatTheyAre) {
  check(cudaSetDevice(2));
  float* x = new_device<float>(4);
  float* pinned = new_pinned<float>(4);
  float y = 0;
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, x + 1));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 2);
  check(cudaPointerGetAttributes(&attributes, pinned + 1));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  check(cudaPointerGetAttributes(&attributes, &y));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  int device = -1;
  EXPECT_TRUE(is_device_memory(x, 16, &device));
  EXPECT_EQ(device, 2);
  EXPECT_FALSE(is_device_memory(x, 17));
  EXPECT_TRUE(is_pinned_memory(pinned, 16));
  EXPECT_FALSE(is_pinned_memory(pinned + 1, 16));
  EXPECT_EQ(storage_of(&y), &y);
  EXPECT_EQ(cudaFree(x + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(x), cudaErrorInvalidValue);
  EXPECT_EQ(live().allocations, before_.allocations + 1);
  EXPECT_EQ(live().pinned_nbytes, before_.pinned_nbytes + 16);
  check(cudaFree(x));
  EXPECT_EQ(cudaFree(x), cudaErrorInvalidValue);
  check(cudaFreeHost(pinned));
}

TEST_F(CudaEmulation, MemoryEndsWhereTheDeviceDoes) {
  Settings small = settings();
  small.memory_nbytes = 1000;
  configure(small);
  char* x = new_device<char>(600);
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(free, 400U);
  EXPECT_EQ(total, 1000U);
  void* y = x;
  EXPECT_EQ(cudaMalloc(&y, 500), cudaErrorMemoryAllocation);
  EXPECT_EQ(y, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // not sticky
  check(cudaFree(x));
  x = new_device<char>(1000);
  check(cudaFree(x));
}

TEST_F(CudaEmulation, TheNthAllocationFailsOnDemand) {
  fail_malloc(/*device=*/0, /*nth=*/2);
  char* x = new_device<char>(8);
  void* y = nullptr;
  EXPECT_EQ(cudaMalloc(&y, 8), cudaErrorMemoryAllocation);
  check(cudaMalloc(&y, 8));
  check(cudaFree(x));
  check(cudaFree(y));

  fail_malloc(/*device=*/0, /*nth=*/2, /*count=*/2);
  x = new_device<char>(8);
  EXPECT_EQ(cudaMalloc(&y, 8), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&y, 8), cudaErrorMemoryAllocation);
  check(cudaMalloc(&y, 8));
  check(cudaFree(x));
  check(cudaFree(y));
}

TEST_F(CudaEmulation, TheNthPageLockedAllocationOfADeviceFailsOnDemand) {
  fail_pinned(/*device=*/0, /*nth=*/2, /*count=*/2);
  char* x = new_device<char>(8);  // not counted
  void *y = nullptr, *z = nullptr;
  check(cudaMallocHost(&y, 8));
  check(cudaSetDevice(1));
  check(cudaMallocHost(&z, 8));
  check(cudaFreeHost(z));
  check(cudaSetDevice(0));
  EXPECT_EQ(cudaMallocHost(&z, 8), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMallocHost(&z, 8), cudaErrorMemoryAllocation);
  EXPECT_EQ(z, nullptr);
  check(cudaMallocHost(&z, 8));
  check(cudaFree(x));
  check(cudaFreeHost(y));
  check(cudaFreeHost(z));
}

TEST_F(CudaEmulationDeathTest, HostMayNotTouchDeviceMemory) {
  auto* x = new_device<volatile int>(10);
  EXPECT_DEATH(x[3] = 1,
               "the host touched device memory: byte 12 of allocation .*40 bytes, device 0");
  EXPECT_DEATH({ [[maybe_unused]] const int y = x[0]; }, "the host touched device memory: byte 0");
  check(cudaFree(const_cast<int*>(x)));
  EXPECT_DEATH(x[3] = 1, "the host touched device memory: byte 12 of freed allocation");
}

TEST_F(CudaEmulationDeathTest, KernelsMayNotTouchWhatIsNotTheirs) {
  const cudaStream_t stream = new_stream();
  int* x = new_device<int>(64);
  EXPECT_DEATH(
      {
        check(launch(stream, x, [](int* y) { y[64] = 1; }));
        cudaStreamSynchronize(stream);
      },
      "test_kernel on stream .* touched device memory that is not allocated: byte 256 of "
      "allocation");
  EXPECT_DEATH(
      {
        check(launch(stream, x, [x](int*) { *x = 1; }));
        cudaStreamSynchronize(stream);
      },
      "test_kernel .* touched device memory by an address that was no kernel argument");
  check(cudaFree(x));
  EXPECT_DEATH(
      {
        check(launch(stream, x, [](int* y) { *y = 1; }));
        cudaStreamSynchronize(stream);
      },
      "touched device memory that is not allocated: byte 0 of freed allocation");
  int* y = new_device<int>(3);
  EXPECT_DEATH(
      {
        check(launch(stream, y, [](int* z) { z[3] = 1; }));
        cudaFree(y);
      },
      "byte 12 of allocation .* was written, out of bounds");
  check(cudaFree(y));
  check(cudaStreamDestroy(stream));
}

TEST_F(CudaEmulationDeathTest, PageLockedMemoryMayNotBeUsedAfterItIsFreed) {
  int* x = new_pinned<int>(4);
  check(cudaFreeHost(x));
  EXPECT_DEATH(*static_cast<volatile int*>(x) = 1,
               "touched page-locked memory that is not allocated: byte 0 of freed allocation");
}

// Copies.

TEST_F(CudaEmulationStreams, PinnedCopiesRunLater) {
  int* pinned = new_pinned<int>(1);
  *pinned = 1;
  expect_race([&] {
    check(enqueue(a_, "slow", [] { sleep_ms(5); }));
    check(cudaMemcpyAsync(x_, pinned, sizeof(int), cudaMemcpyHostToDevice, a_));
    *pinned = 2;  // too early
    EXPECT_EQ(read(a_, x_), 2);
  });
  expect_race([&] {
    *pinned = -1;
    set_late(a_, 5);
    check(cudaMemcpyAsync(pinned, x_, sizeof(int), cudaMemcpyDeviceToHost, a_));
    EXPECT_EQ(*pinned, -1);  // too early
    check(cudaStreamSynchronize(a_));
  });
  EXPECT_EQ(*pinned, 5);
  check(cudaFreeHost(pinned));
}

TEST_F(CudaEmulationStreams, PageableCopiesAreStagedAndComeBackBlocking) {
  int host = 1;
  std::atomic<bool> free = false;
  check(enqueue(a_, "hold", [&] {
    while (!free) std::this_thread::yield();
  }));
  check(cudaMemcpyAsync(x_, &host, sizeof host, cudaMemcpyHostToDevice, a_));
  host = 2;
  free = true;
  const std::int64_t blocking = calls().blocking;
  EXPECT_EQ(read(a_, x_), 1);
  EXPECT_EQ(calls().blocking, blocking + 1);
  set_late(a_, 3);
  check(cudaMemcpyAsync(&host, x_, sizeof host, cudaMemcpyDefault, a_));
  EXPECT_EQ(host, 3);
}

TEST_F(CudaEmulationStreams, SynchronousCopiesDoNotWaitForOtherStreams) {
  int host = 4;
  check(cudaMemcpy(x_, &host, sizeof host, cudaMemcpyHostToDevice));
  check(cudaMemcpy(&host, x_, sizeof host, cudaMemcpyDeviceToHost));
  EXPECT_EQ(host, 4);
  std::atomic<bool> free = false;
  check(enqueue(a_, "hold", [&] {
    while (!free) std::this_thread::yield();
  }));
  check(cudaMemset(x_, 1, sizeof(int)));
  check(cudaMemcpy(&host, x_, sizeof host, cudaMemcpyDeviceToHost));
  EXPECT_EQ(host, 0x01010101);
  free = true;
  check(cudaDeviceSynchronize());
}

TEST_F(CudaEmulationStreams, CopiesThatCannotBeAreRefused) {
  int host[2] = {};
  const auto refused = [&](void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(dst, src, nbytes, kind, a_) == cudaErrorInvalidValue &&
           cudaGetLastError() == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused(x_, host, 8, cudaMemcpyHostToDevice));  // past the end
  EXPECT_TRUE(refused(host, x_, 8, cudaMemcpyDefault));
  EXPECT_TRUE(refused(x_, host, 4, cudaMemcpyDeviceToHost));
  EXPECT_TRUE(refused(host, x_, 4, cudaMemcpyHostToHost));
  EXPECT_TRUE(refused(x_, host, 4, cudaMemcpyDeviceToDevice));
  EXPECT_TRUE(refused(nullptr, x_, 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(cudaMemsetAsync(x_, 0, 5, a_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(host, 0, 4, a_), cudaErrorInvalidValue);
}

TEST_F(CudaEmulationStreams, CopiesBetweenDevices) {
  set_late(a_, 6);
  check(cudaSetDevice(1));
  int* y = new_device<int>(1);
  check(cudaMemcpyPeerAsync(y, 1, x_, 0, sizeof(int), a_));
  EXPECT_EQ(cudaMemcpyPeerAsync(y, 0, x_, 1, sizeof(int), a_), cudaErrorInvalidValue);
  EXPECT_EQ(read(a_, y), 6);
  check(cudaFree(y));
}

}  // namespace
}  // namespace tessera::cuda_emulation

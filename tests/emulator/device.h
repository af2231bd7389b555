// CUDA C++ for a host compiler: included before every .cu file that runs on the emulated device.
// Functions with CUDA's names behave as in the CUDA C++ Programming Guide unless stated.
//
// The ABI tags are read by symbols.h. Write `alignas(16) __shared__ T x[N]`, not `__shared__
// alignas(16)`.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/emulator/grid.h"
#include "tests/emulator/mma.h"
#include "tests/emulator/runtime.h"
#include "tests/emulator/symbols.h"
#include "tests/emulator/wgmma.h"

// The threads of a block run on one OS thread.
#undef __shared__
#define __shared__ static thread_local __attribute__((abi_tag("cuda_shared")))
#undef __global__
#define __global__ __attribute__((abi_tag("cuda_kernel")))
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace tessera::cuda_emulation {

/// Replaces the device addresses in a kernel argument.
template <class T>
void translate(T& argument) {
  static_assert(std::is_trivially_copyable_v<T>, "a kernel argument is copied as bytes");
  if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) {
    check_pointer_argument(argument);
  }
  if constexpr (alignof(T) >= alignof(void*)) {
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&argument);  // may hold part of an old address
#endif
    translate_arguments(&argument, sizeof argument);
  }
}

/// What cudaLaunchKernelEx does with this configuration.
template <class... Params, class... Args>
cudaError_t launch_kernel(const cudaLaunchConfig_t& config, void (*kernel)(Params...),
                          Args&&... args) {
  std::tuple<std::remove_cvref_t<Params>...> packed(std::forward<Args>(args)...);
  std::apply([](auto&... argument) { (translate(argument), ...); }, packed);
  const auto* address = reinterpret_cast<const void*>(kernel);
  const KernelSymbols& symbols = kernel_symbols(address);
  const GridShape shape{config.gridDim, config.blockDim, config.dynamicSmemBytes};
  return enqueue_kernel(config.stream,
                        {.name = symbols.name,
                         .kernel = address,
                         .grid = config.gridDim,
                         .block = config.blockDim,
                         .shared_nbytes = config.dynamicSmemBytes,
                         .run_grid = [kernel, packed, &symbols, shape](std::uint64_t seed) {
                           run_grid(symbols, shape, seed, [&] { std::apply(kernel, packed); });
                         }});
}

namespace internal {

template <class T>
T shuffle(unsigned mask, T value, unsigned source, Place where) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  Exchange mine{.source = source};
  std::memcpy(&mine.in, &value, sizeof value);
  meet(kShuffle, mask, &mine, where);
  std::memcpy(&value, &mine.out, sizeof value);
  return value;
}

inline unsigned ballot(unsigned mask, bool predicate, Place where) {
  Exchange mine{.in = predicate};
  meet(kBallot, mask, &mine, where);
  return static_cast<unsigned>(mine.out);
}

template <class T, class F>
T reduce(unsigned mask, T value, F combine, Place where) {
  Gathered mine;
  std::memcpy(&mine.in, &value, sizeof value);
  meet(kGather, mask, &mine, where);
  T result = value;
  bool first = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    T other;
    std::memcpy(&other, &mine.all[lane], sizeof other);
    result = first ? other : combine(result, other);
    first = false;
  }
  return result;
}

// What fences of all threads read and write, so that they are ordered.
inline std::atomic<unsigned> fence{0};

}  // namespace internal

/// ld.acquire.gpu and st.release.gpu. Builtins: without optimisation GCC takes the order that
/// std::atomic_ref hands on for the strongest one.
inline unsigned load_acquire(const unsigned* address) {
  let_overtake();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release(unsigned* address, unsigned value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
  note_progress();
  let_overtake();
}
}  // namespace tessera::cuda_emulation

// Barriers.
inline void __syncthreads(
    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  tessera::cuda_emulation::sync_block("__syncthreads", false, where);
}
inline int __syncthreads_count(
    int predicate, tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::sync_block("__syncthreads_count", predicate != 0, where);
}
inline int __syncthreads_or(
    int predicate, tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::sync_block("__syncthreads_or", predicate != 0, where) != 0;
}
inline int __syncthreads_and(
    int predicate, tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::sync_block("__syncthreads_and", predicate == 0, where) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, tessera::cuda_emulation::Place where =
                                                tessera::cuda_emulation::Place::here()) {
  tessera::cuda_emulation::meet(tessera::cuda_emulation::kSyncWarp, mask, nullptr, where);
}
inline void __threadfence() {
  tessera::cuda_emulation::internal::fence.fetch_add(1, std::memory_order_acq_rel);
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
/// Every loop that waits for what others write calls it: see [Note: blocks that wait].
inline void __nanosleep(
    unsigned, tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  tessera::cuda_emulation::wait_for_others(where);
}

// Warp functions. A lane that takes no part reads as all bits set.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  const unsigned segment = static_cast<unsigned>(width) - 1;
  const unsigned lane = tessera::cuda_emulation::current_lane();
  return tessera::cuda_emulation::internal::shuffle(
      mask, value, (lane & ~segment) | (static_cast<unsigned>(source) & segment), where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  const unsigned lane = tessera::cuda_emulation::current_lane();
  const unsigned in_segment = lane & (static_cast<unsigned>(width) - 1);
  return tessera::cuda_emulation::internal::shuffle(
      mask, value, delta <= in_segment ? lane - delta : lane, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  const unsigned lane = tessera::cuda_emulation::current_lane();
  const unsigned in_segment = lane & (static_cast<unsigned>(width) - 1);
  return tessera::cuda_emulation::internal::shuffle(
      mask, value, in_segment + delta < static_cast<unsigned>(width) ? lane + delta : lane, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  const unsigned lane = tessera::cuda_emulation::current_lane();
  const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
  const unsigned last = lane | (static_cast<unsigned>(width) - 1);
  return tessera::cuda_emulation::internal::shuffle(mask, value, source <= last ? source : lane,
                                                    where);
}
inline unsigned __ballot_sync(
    unsigned mask, int predicate,
    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::internal::ballot(mask, predicate != 0, where);
}
inline int __any_sync(
    unsigned mask, int predicate,
    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::internal::ballot(mask, predicate != 0, where) != 0;
}
inline int __all_sync(
    unsigned mask, int predicate,
    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::internal::ballot(mask, predicate == 0, where) == 0;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value,
                    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::internal::reduce(
      mask, value, [](T a, T b) { return static_cast<T>(a + b); }, where);
}
template <class T>
T __reduce_max_sync(unsigned mask, T value,
                    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::internal::reduce(
      mask, value, [](T a, T b) { return std::max(a, b); }, where);
}
template <class T>
T __reduce_min_sync(unsigned mask, T value,
                    tessera::cuda_emulation::Place where = tessera::cuda_emulation::Place::here()) {
  return tessera::cuda_emulation::internal::reduce(
      mask, value, [](T a, T b) { return std::min(a, b); }, where);
}
/// No lane can count on others to be with it.
inline unsigned __activemask() { return 1u << tessera::cuda_emulation::current_lane(); }

// Atomics: they order no other memory.
template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
}
template <class T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_sub(value, std::memory_order_relaxed);
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).exchange(value, std::memory_order_relaxed);
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_or(value, std::memory_order_relaxed);
}
template <class T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_and(value, std::memory_order_relaxed);
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*address).compare_exchange_strong(expected, value, std::memory_order_relaxed);
  return expected;
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  const std::atomic_ref<T> ref(*address);
  T before = ref.load(std::memory_order_relaxed);
  while (before < value && !ref.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
  return before;
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  const std::atomic_ref<T> ref(*address);
  T before = ref.load(std::memory_order_relaxed);
  while (value < before && !ref.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
  return before;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const std::atomic_ref<unsigned> ref(*address);
  unsigned before = ref.load(std::memory_order_relaxed);
  while (!ref.compare_exchange_weak(before, before >= last ? 0 : before + 1,
                                    std::memory_order_relaxed)) {
  }
  return before;
}

// Loads and stores with cache hints.
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

// Arithmetic. The fast functions are as exact as the host's: the device's have more error.
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(
    A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  return std::max(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(
    A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  return std::min(static_cast<T>(a), static_cast<T>(b));
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
// glibc declares these three for itself.
extern "C" inline float __expf(float x) noexcept { return std::exp(x); }
extern "C" inline float __logf(float x) noexcept { return std::log(x); }
extern "C" inline float __powf(float x, float y) noexcept { return std::pow(x, y); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? std::fmin(x, 1.0f) : 0.0f; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(double{x})); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed = reversed << 1 | (x >> i & 1u);
  return reversed;
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((std::uint64_t{x} * y) >> 32);
}
inline int __mulhi(int x, int y) { return static_cast<int>((std::int64_t{x} * y) >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(x) * y) >> 64);
}
inline void __trap() {
  tessera::cuda_emulation::fail_launch("__trap()", tessera::cuda_emulation::Place::here());
}

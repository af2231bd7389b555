// Tensor-core instructions of sm_80 and later as device functions. Private to ops.
//
// On the emulated device each has a twin (tessera::cuda_emulation, same name) that follows the
// fragment layouts of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and
// "ldmatrix". With lane = thread % 32, g = lane / 4, t = lane % 4, and a register holding two bf16,
// the lower index in the lower half:
//
//   A (16 x 16), a[r]: row g + 8 * (r & 1), columns 2 t, 2 t + 1 (+ 8 for r >= 2)
//   B (16 x 8),  b[r]: rows 2 t, 2 t + 1 (+ 8 for r == 1), column g
//   D (16 x 8),  d[i]: row g + 8 * (i >> 1), column 2 t + (i & 1)
//
// All 32 lanes of a warp call mma_* and ldmatrix_* together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/dtype.h"
#include "ops/bf16_pair.cuh"

namespace tessera::ops {

/// d += a b for one 16 x 8 x 16 tile: bf16 products are exact, sums are f32 in unspecified order.
inline __device__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                    const std::uint32_t (&b)[2]) {
#if defined(__CUDACC__)
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  cuda_emulation::mma_m16n8k16(d, a, b);
#endif
}

/// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 i + j passes the address
/// of row j of matrix i (16-byte aligned, 8 elements); r[i] then holds row lane / 4, columns
/// 2 (lane % 4) and the next of matrix i.
inline __device__ void ldmatrix_x4(std::uint32_t (&r)[4], const void* shared_row) {
#if defined(__CUDACC__)
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#else
  cuda_emulation::ldmatrix(r, shared_row, false);
#endif
}

/// As ldmatrix_x4 with each matrix transposed: r[i] holds rows 2 (lane % 4) and the next, column
/// lane / 4 of matrix i.
inline __device__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* shared_row) {
#if defined(__CUDACC__)
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#else
  cuda_emulation::ldmatrix(r, shared_row, true);
#endif
}

/// As ldmatrix_x4 for two matrices: the rows come from lanes 0 to 15, the other lanes pass any
/// aligned shared address.
inline __device__ void ldmatrix_x2(std::uint32_t (&r)[2], const void* shared_row) {
#if defined(__CUDACC__)
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
#else
  cuda_emulation::ldmatrix(r, shared_row, false);
#endif
}

/// As ldmatrix_x2 with each matrix transposed.
inline __device__ void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* shared_row) {
#if defined(__CUDACC__)
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
#else
  cuda_emulation::ldmatrix(r, shared_row, true);
#endif
}

/// Starts the copy of 16 bytes from global to shared memory (both 16-byte aligned); with !valid the
/// destination is zero-filled and `global` is not read. The issuing thread sees the bytes after
/// cp_async_wait; other threads after a barrier that follows it.
inline __device__ void cp_async_16(void* shared, const void* global, bool valid = true) {
#if defined(__CUDACC__)
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  const int nbytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(address), "l"(__cvta_generic_to_global(global)), "r"(nbytes)
               : "memory");
#else
  cuda_emulation::cp_async_16(shared, global, valid);
#endif
}

/// Closes the group of this thread's copies since the last commit (it may be empty).
inline __device__ void cp_async_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  cuda_emulation::cp_async_commit();
#endif
}

/// Waits until at most the last `kPending` groups of this thread are still under way.
template <int kPending>
__device__ void cp_async_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#else
  cuda_emulation::cp_async_wait(kPending);
#endif
}

/// Waits for all copies of this thread, committed or not.
inline __device__ void cp_async_wait_all() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  cuda_emulation::cp_async_wait_all();
#endif
}

}  // namespace tessera::ops

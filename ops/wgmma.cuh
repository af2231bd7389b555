// Products of a warpgroup (wgmma, sm_90a alone) as device functions. Private to ops.
//
// [Note: warpgroup products]
// A warpgroup is four warps, the first a multiple of four. All its threads call these functions
// together, and with the same descriptors. d (64 x 64) += a (64 x 16) b (16 x 64), bf16 in and f32
// out, where b lies in shared memory and a there or in registers. With w = warp % 4, l = lane,
// g = l / 4, t = l % 4 (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"):
//
//   d[n][i]: row 16 w + g + 8 (i / 2), column 8 n + 2 t + i % 2
//   a[r]:    row 16 w + g + 8 (r % 2), columns 2 t and 2 t + 1, + 8 for r >= 2
//
// So 16 neighbouring columns of d, d[n] and d[n + 1] for an even n, are those of an a: rounded to
// bf16 in pairs, an accumulator is the left operand of the next product without moving.
//
// A product is under way from its call until a wgmma_wait for its group is over. Until then nobody
// may touch its registers, nor write what it reads of shared memory. The rules:
//   - wgmma_fence names the registers of the products that follow, d and a, when they were touched
//     since the last of theirs, or never before. d of several products in a row needs one fence.
//   - wgmma_commit closes a group, wgmma_wait<n> waits for all but the last n, and names the
//     registers that are read afterwards: naming keeps the compiler from moving their uses.
//   - Products read shared memory by the async proxy. Who has written operands, by cp_async_16
//     (after its wait) or by store_operand, calls fence_async_proxy before the barrier after
//     which they are multiplied. The end of a product orders it before later writes, as far as the
//     barrier between the two goes.
//
// [Note: operands in shared memory]
// Operands lie in panels of 64 columns: a row has 128 bytes, 8 rows are an atom of 1,024 bytes,
// which begins at a multiple of 1,024 (base offset 0), and rows follow each other. In a row the 16
// bytes number c (0 to 7) lie at c ^ (row % 8): the 128-byte swizzle, bits 4 to 6 of the address
// combined with bits 7 to 9 (PTX ISA, "Shared Memory Matrix Layout": Swizzle<3, 4, 3>). So what is
// read along a row or along a column lies in all banks. An operand of 64 by 16 is read from there
// in one of two ways; T = 8 elements of 16 bytes in the canonical layouts of the PTX ISA:
//
//   K-major, ((8, m), (T, 2)) : ((8 T, SBO), (1, T)): rows of the operand are rows of the panel and
//   its 16 columns (k) are 16 columns, 32 bytes, of it. From a row to the next 8 T elements = 128
//   bytes, from 8 rows to the next SBO = 1,024. The next k begins 32 bytes on. LBO is not used.
//   MN-major ("transposed"), ((T, 8, m), (8, k)) : ((1, T, LBO), (8 T, SBO)): rows of the operand
//   are the 64 columns of the panel, T * 8 elements = 128 bytes, and its k are 16 rows: one to the
//   next 8 T = 128 bytes, 8 to the next 8 SBO = 1,024. The next k begins 2,048 bytes on. LBO is the
//   way to the next 64 columns, and there are none (m = 1).
//
// So one tile of tokens by head size serves as either operand, by either dimension.
//
// Bits of a descriptor: 0-13 address / 16, 16-29 LBO / 16, 32-45 SBO / 16, 49-51 base offset, 62-63
// swizzle (1: 128 bytes).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "engine/dtype.h"

namespace tessera::ops {

inline constexpr int kPanelColumns = 64, kPanelRowNbytes = 128, kAtomNbytes = 1024;

/// Address of shared memory in its window.
inline __device__ std::uint32_t shared_address(const void* shared) {
#if defined(__CUDACC__)
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
#else
  return cuda_emulation::shared_address(shared);
#endif
}

/// The first address of the block's dynamic shared memory at which an atom may begin; a launch asks
/// for kAtomNbytes more for it.
inline __device__ engine::BFloat16* first_atom() {
  auto* first = engine::dynamic_shared<unsigned char>();
  return reinterpret_cast<engine::BFloat16*>(first + (0u - shared_address(first)) % kAtomNbytes);
}

/// Element of a panel at this row and column.
inline __device__ int panel_at(int row, int column) {
  return row * kPanelColumns + (((column / 8) ^ (row % 8)) * 8 + column % 8);
}

/// The descriptor of an operand whose first element would be at `shared` without the swizzle.
inline __device__ std::uint64_t operand_at(const void* shared) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kStrides = std::uint64_t{kAtomNbytes / 16} << 32 | std::uint64_t{1} << 16;
  return kSwizzle128 | kStrides | (shared_address(shared) & 0x3FFFFu) >> 4;
}
/// The descriptor of the operand `nbytes` further on.
inline __device__ std::uint64_t advance(std::uint64_t operand, int nbytes) {
  return operand + static_cast<std::uint64_t>(nbytes / 16);
}
/// Bytes from 16 k of an operand to the next 16, K-major and MN-major.
inline constexpr int kNextKMajor = 32, kNextMnMajor = 16 * kPanelRowNbytes;

/// Writes two elements of an operand.
inline __device__ void store_operand(engine::BFloat16* shared, std::uint32_t pair) {
#if defined(__CUDACC__)
  *reinterpret_cast<std::uint32_t*>(shared) = pair;
#else
  cuda_emulation::store_operand(shared, pair);
#endif
}

/// Makes what the calling thread has written to shared memory visible to products that are called
/// after the next barrier.
inline __device__ void fence_async_proxy() {
#if defined(__CUDACC__)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  cuda_emulation::fence_async_proxy();
#endif
}

namespace internal {

#if defined(__CUDACC__)
// No use of these registers moves across it.
inline __device__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
inline __device__ void pin(std::uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
template <class T, std::size_t kCount>
__device__ void pin(T (&x)[kCount]) {
#pragma unroll
  for (std::size_t i = 0; i < kCount; ++i) pin(x[i]);
}
#endif

}  // namespace internal

/// Orders what was done with these registers, arrays of f32 or of words, before the products that
/// follow.
template <class... Registers>
__device__ void wgmma_fence(Registers&... registers) {
#if defined(__CUDACC__)
  (internal::pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  cuda_emulation::wgmma_fence({{&registers, sizeof registers}...});
#endif
}

/// Closes the group of the products since the last.
inline __device__ void wgmma_commit() {
#if defined(__CUDACC__)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  cuda_emulation::wgmma_commit();
#endif
}

/// Waits until at most the last `kPending` groups are under way, and so for these registers.
template <int kPending, class... Registers>
__device__ void wgmma_wait(Registers&... registers) {
#if defined(__CUDACC__)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (internal::pin(registers), ...);
#else
  cuda_emulation::wgmma_wait(kPending, {{&registers, sizeof registers}...});
#endif
}

#if defined(__CUDACC__)
#define TESSERA_FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TESSERA_D                                                                   \
  TESSERA_FOUR(kFirst), TESSERA_FOUR(kFirst + 1), TESSERA_FOUR(kFirst + 2),         \
      TESSERA_FOUR(kFirst + 3), TESSERA_FOUR(kFirst + 4), TESSERA_FOUR(kFirst + 5), \
      TESSERA_FOUR(kFirst + 6), TESSERA_FOUR(kFirst + 7)
#define TESSERA_D_NAMES                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#endif

/// d[kFirst] to d[kFirst + 7] = a b, or += a b. Operands that are transposed are MN-major.
template <bool kATransposed, bool kBTransposed, int kFirst = 0, std::size_t kN>
__device__ void wgmma(float (&d)[kN][4], std::uint64_t a, std::uint64_t b, bool accumulate) {
  static_assert(kFirst + 8 <= kN);
#if defined(__CUDACC__)
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TESSERA_D_NAMES
      "%32, %33, accumulate, 1, 1, %35, %36;\n"
      "}\n"
      : TESSERA_D
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int{kATransposed}),
        "n"(int{kBTransposed}));
#else
  cuda_emulation::wgmma({.d = d[kFirst],
                         .num_d = 32,
                         .descriptor_a = a,
                         .descriptor_b = b,
                         .a_is_transposed = kATransposed,
                         .b_is_transposed = kBTransposed,
                         .accumulate = accumulate});
#endif
}

/// wgmma() with `a` in registers.
template <bool kBTransposed, int kFirst = 0, std::size_t kN>
__device__ void wgmma(float (&d)[kN][4], std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) {
  static_assert(kFirst + 8 <= kN);
#if defined(__CUDACC__)
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " TESSERA_D_NAMES
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n"
      "}\n"
      : TESSERA_D
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(int{kBTransposed}));
#else
  cuda_emulation::wgmma({.d = d[kFirst],
                         .num_d = 32,
                         .a = a,
                         .descriptor_b = b,
                         .b_is_transposed = kBTransposed,
                         .accumulate = accumulate});
#endif
}

#if defined(__CUDACC__)
#undef TESSERA_D_NAMES
#undef TESSERA_D
#undef TESSERA_FOUR
#endif

}  // namespace tessera::ops

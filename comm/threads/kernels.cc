#include "comm/threads/kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "engine/elementwise.h"
#include "engine/isa.h"

// [Note: rank order] A reduction is a left fold over the ranks: ((in_0 + in_1) + in_2) + ..., each
// partial sum rounded to f32, bf16 widened exactly. It is what one process computes that
// accumulates the same contributions one after the other: with Accumulate::kYes the fold starts
// from the running sum, so k steps of N ranks are k * N additions in one fixed order, and no bit
// depends on how many ranks shared them, on how the range was cut into chunks, or on who computed a
// chunk. A tree or a ring would add in another order for each N; on shared memory neither would be
// faster, since every input is read once either way.
namespace tessera::comm {
namespace {

// 16-byte stores that bypass the cache. Elsewhere than on x86: the compiler's memcpy.
void copy_streaming(std::byte* dst, const std::byte* src, std::int64_t nbytes) {
#if defined(__SSE2__)
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(dst) % 16);
  const std::int64_t head = std::min((16 - misaligned) % 16, nbytes);
  std::memcpy(dst, src, static_cast<std::size_t>(head));
  std::int64_t i = head;
  for (; i + 64 <= nbytes; i += 64) {
    for (int k = 0; k < 64; k += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i + k),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + k)));
    }
  }
  std::memcpy(dst + i, src + i, static_cast<std::size_t>(nbytes - i));
  _mm_sfence();  // these stores are not ordered by the release that publishes them
#else
  std::memcpy(dst, src, static_cast<std::size_t>(nbytes));
#endif
}

// acc = in_0 + ... + in_{K-1}, or onto what acc holds. K inputs at once: K streams for the
// prefetcher, partial sums in registers.
template <int K, class T>
void fold(float* __restrict acc, const void* const* ins, std::int64_t begin, std::int64_t n,
          bool onto_acc) {
  std::array<const T*, K> in;
  for (int k = 0; k < K; ++k) in[k] = static_cast<const T*>(ins[k]) + begin;
  const auto add_from = [&](float x, int first, std::int64_t i) {
    for (int k = first; k < K; ++k) x += engine::to_f32(in[k][i]);
    return x;
  };
  if (onto_acc) {
    for (std::int64_t i = 0; i < n; ++i) acc[i] = add_from(acc[i], 0, i);
  } else {
    for (std::int64_t i = 0; i < n; ++i) acc[i] = add_from(engine::to_f32(in[0][i]), 1, i);
  }
}

template <class T>
void sum(std::span<const void* const> ins, const float* start, std::span<float* const> outs,
         std::int64_t numel, Store store) {
  constexpr std::int64_t kTile = 2048;  // 8 KiB: stays in the first-level cache
  alignas(64) std::array<float, kTile> tile;
  float* const acc = tile.data();
  for (std::int64_t begin = 0; begin < numel; begin += kTile) {
    const std::int64_t n = std::min(kTile, numel - begin);
    if (start != nullptr) engine::cast(acc, start + begin, n);
    bool onto_acc = start != nullptr;
    for (std::span<const void* const> left = ins; !left.empty(); onto_acc = true) {
      const std::size_t k = std::min<std::size_t>(std::bit_floor(left.size()), 8);
      if (k == 8) fold<8, T>(acc, left.data(), begin, n, onto_acc);
      if (k == 4) fold<4, T>(acc, left.data(), begin, n, onto_acc);
      if (k == 2) fold<2, T>(acc, left.data(), begin, n, onto_acc);
      if (k == 1) fold<1, T>(acc, left.data(), begin, n, onto_acc);
      left = left.subspan(k);
    }
    for (float* out : outs) {
      const bool was_read = out == start || std::ranges::find(ins, out) != ins.end();
      copy(out + begin, acc, n * std::int64_t{sizeof(float)}, was_read ? Store::kCached : store);
    }
  }
}

}  // namespace

Store store_for(std::int64_t nbytes_written) {
  constexpr std::int64_t kCache = 8 << 20;
  return nbytes_written > kCache ? Store::kStreaming : Store::kCached;
}

void copy(void* dst, const void* src, std::int64_t nbytes, Store store) {
  if (store == Store::kStreaming) {
    copy_streaming(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), nbytes);
  } else {
    std::memcpy(dst, src, static_cast<std::size_t>(nbytes));
  }
}

void sum_in_rank_order(engine::DType dtype, std::span<const void* const> ins, const float* start,
                       std::span<float* const> outs, std::int64_t numel, Store store) {
  engine::with_isa([&] {
    engine::dispatch_float(dtype, "sum_in_rank_order",
                           [&](auto t) { sum<decltype(t)>(ins, start, outs, numel, store); });
  });
}

}  // namespace tessera::comm

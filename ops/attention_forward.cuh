// Attention forward in bf16. See [Note: attention fragments].
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention_cuda.h"
#include "ops/attention_tile.cuh"

namespace tessera::ops::flash {

/// Two tiles of keys and values, one in use and one on its way.
template <int kSize>
struct ForwardTiles {
  static constexpr int kM = 2;
  static constexpr int kRows = kWarps * kM * 16;
  static constexpr int kKeys = kSize > 64 ? 32 : 64;
  static constexpr std::size_t kSharedNbytes =
      (kRows + 4 * kKeys) * kPitch<kSize> * sizeof(BFloat16);
};

/// The online softmax of a warp's rows. Maxima are those of the unscaled scores; sums are of the
/// columns that this lane holds, until finish().
template <int kM>
struct OnlineSoftmax {
  float max[kM][2], sum[kM][2];  // of rows lane / 4 and lane / 4 + 8 of a fragment

  __device__ OnlineSoftmax() {
    for (int m = 0; m < kM; ++m)
      for (int half = 0; half < 2; ++half) max[m][half] = -INFINITY, sum[m][half] = 0;
  }

  /// Takes scores to probabilities relative to the largest so far, and scales `out` to match.
  template <int kN, int kOut>
  __device__ void update(float (&scores)[kM][kN][4], float (&out)[kM][kOut][4], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = half * 2;
        float largest = max[m][half];
#pragma unroll
        for (int n = 0; n < kN; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][e], scores[m][n][e + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        // Of a document that begins after these columns nothing is seen yet.
        const float offset = largest == -INFINITY ? 0 : largest * scale_log2;
        const float factor = exp2_approx(max[m][half] * scale_log2 - offset);
        max[m][half] = largest;
        float added = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          scores[m][n][e] = exp2_approx(fmaf(scores[m][n][e], scale_log2, -offset));
          scores[m][n][e + 1] = exp2_approx(fmaf(scores[m][n][e + 1], scale_log2, -offset));
          added += scores[m][n][e] + scores[m][n][e + 1];
        }
        sum[m][half] = fmaf(sum[m][half], factor, added);
#pragma unroll
        for (int n = 0; n < kOut; ++n) out[m][n][e] *= factor, out[m][n][e + 1] *= factor;
      }
    }
  }

  /// Divides `out` by the sums of whole rows.
  template <int kOut>
  __device__ void finish(float (&out)[kM][kOut][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& whole = sum[m][half];
        whole += __shfl_xor_sync(~0u, whole, 1);
        whole += __shfl_xor_sync(~0u, whole, 2);
        const float inverse = 1 / whole;
#pragma unroll
        for (int n = 0; n < kOut; ++n)
          out[m][n][half * 2] *= inverse, out[m][n][half * 2 + 1] *= inverse;
      }
    }
  }
};

/// One block for kRows queries of a head; blocks with the most keys come first, but for documents.
/// `lse` may be null.
template <bool kVector, int kSize, class Layout>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Layout s, const BFloat16* qkv, BFloat16* y, float* lse) {
  using Tiles = ForwardTiles<kSize>;
  constexpr int kM = Tiles::kM, kKeys = Tiles::kKeys;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::kRows;
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int g = h / static_cast<int>(s.group());
  const Rows<const BFloat16> q{qkv + s.q_at(b, h), s.qkv_width()};
  const Rows<const BFloat16> k{qkv + s.k_at(b, g), s.qkv_width()};
  const Rows<const BFloat16> v{qkv + s.v_at(b, g), s.qkv_width()};

  auto* q_tile = engine::dynamic_shared<BFloat16>();
  BFloat16* kv_tiles = q_tile + Tiles::kRows * kPitch<kSize>;
  const auto k_tile = [&](int i) { return kv_tiles + i % 2 * (2 * kKeys * kPitch<kSize>); };
  const auto v_tile = [&](int i) { return k_tile(i) + kKeys * kPitch<kSize>; };
  const auto load = [&](int i) {
    load_tile<kVector, kKeys, kSize>(k_tile(i), k, i * kKeys, tokens, head_size);
    load_tile<kVector, kKeys, kSize>(v_tile(i), v, i * kKeys, tokens, head_size);
    cp_async_commit();
  };

  const int warp_row = row + warp_id() * kM * 16;
  const int end = s.causal ? min(row + Tiles::kRows, tokens) : tokens;
  const int warp_end = warp_row >= tokens ? 0 : s.causal ? warp_row + kM * 16 : tokens;
  const int first = s.first_key(b, row) / kKeys;  // tile
  const float scale_log2 = s.scale * kLog2E;
  float out[kM][kSize / 8][4] = {};
  OnlineSoftmax<kM> softmax;

  load_tile<kVector, Tiles::kRows, kSize>(q_tile, q, row, tokens, head_size);
  load(first);
#pragma unroll 1
  for (int i = first; i * kKeys < end; ++i) {
    cp_async_wait<0>();
    __syncthreads();  // tile i is here, and nobody reads tile i - 1 any more
    if ((i + 1) * kKeys < end) load(i + 1);
    const int key = i * kKeys;
    // Nothing that this warp's queries see.
    if (key >= warp_end) continue;
    if (Layout::kHasDocuments && key + kKeys <= s.first_key(b, warp_row)) continue;
    float scores[kM][kKeys / 8][4];
    multiply_transposed<kSize>(scores, q_tile + warp_id() * kM * 16 * kPitch<kSize>, k_tile(i));
    if (key + kKeys > (s.causal ? warp_row + 1 : tokens) ||
        (Layout::kHasDocuments && key < s.first_key(b, min(warp_row + kM * 16, tokens) - 1))) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = warp_row + m * 16 + lane_id() / 4 + half * 8;
          const int begin = query < tokens ? s.first_key(b, query) : 0;
          const int visible = s.causal ? query + 1 : tokens;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = key + n * 8 + lane_id() % 4 * 2 + e;
              if (column >= visible || (Layout::kHasDocuments && column < begin))
                scores[m][n][half * 2 + e] = -INFINITY;
            }
          }
        }
      }
    }
    softmax.update(scores, out, scale_log2);
    multiply_add<kSize>(out, scores, v_tile(i));
  }
  softmax.finish(out);
  store_rows<kVector>(Rows<BFloat16>{y + s.y_at(b, h), s.y_width()}, out, 1, warp_row, tokens,
                      head_size, false);
  if (lse == nullptr || lane_id() % 4 != 0) return;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = warp_row + m * 16 + lane_id() / 4 + half * 8;
      if (query < tokens)
        lse[s.lse_at(b, h) + query] = softmax.max[m][half] * s.scale + logf(softmax.sum[m][half]);
    }
  }
}

}  // namespace tessera::ops::flash

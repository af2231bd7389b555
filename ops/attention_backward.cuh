// Attention backward in bf16. See [Note: attention fragments].
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention_cuda.h"
#include "ops/attention_tile.cuh"

namespace tessera::ops::flash {

// [Note: deterministic attention backward]
// With p = exp(scale * q k^T - lse) and ds = p * (dy v^T - delta), delta = rowsum(dy * y):
//   dv = p^T dy,  dk = scale * ds^T q,  dq = scale * ds k.
// dk and dv are sums over queries, dq is one over keys, so one pass over all tiles would have to
// add one of them into memory from many blocks, in the order in which they happen to finish.
// Instead two kernels compute p and ds: blocks that own keys walk the queries (of every head of the
// group, in order) and blocks that own queries walk the keys. That is 7 products in place of 5, and
// no sum leaves its registers. What a block owns and what it walks are otherwise alike, so both are
// one template: the left operands are its own rows, and probabilities of owned keys are born
// transposed. Faster and still deterministic: a single pass over keys in which each block adds its
// part of dq in f32 once a counter of that tile of queries says that its predecessor has (as
// FlashAttention's deterministic mode does), with key tiles issued such that neighbours are one
// step apart; the five products then pay for an f32 dq that is read and written once a key tile.
template <int kSize>
struct BackwardTiles {
  static constexpr int kM = kSize > 64 ? 1 : 2;
  static constexpr int kOwn = kWarps * kM * 16;
  static constexpr int kOther = kSize > 64 ? 32 : 64;
  static constexpr int kChunk = 32;  // of the other side, whose scores a warp holds at a time
  static constexpr int kTileNumel = kOther * kPitch<kSize>;
  static constexpr std::size_t kSharedNbytes =
      (2 * kOwn * kPitch<kSize> + 4 * kTileNumel) * sizeof(BFloat16) + 4 * kOther * sizeof(float);
};

struct BackwardTensors {
  const BFloat16 *qkv, *dy;
  const float *lse, *delta;
  BFloat16* dqkv;
  bool accumulate;
};

/// log-sum-exp in powers of two, and delta, of a query; such that p = 0 where there is none.
struct QueryStats {
  float lse_log2 = INFINITY, delta = 0;
};

__device__ inline QueryStats load_stats(const float* lse, const float* delta, int query,
                                        int tokens) {
  if (query >= tokens) return {};
  return {lse[query] * kLog2E, delta[query]};
}

/// kOwnKeys: one block for kOwn keys of a kv head, computes dk and dv. Otherwise one for kOwn
/// queries of a head, computes dq. Blocks with the longest walk come first.
template <bool kVector, int kSize, bool kOwnKeys>
__global__ void __launch_bounds__(kThreads) backward_kernel(AttentionLayout s, BackwardTensors x) {
  using Tiles = BackwardTiles<kSize>;
  constexpr int kM = Tiles::kM, kOwn = Tiles::kOwn, kOther = Tiles::kOther;
  constexpr int kChunk = Tiles::kChunk, kN = kChunk / 8;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int group = static_cast<int>(s.group()), lane = lane_id();

  // Which rows of which head.
  const int tile = static_cast<int>(kOwnKeys ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  const int head = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int g = kOwnKeys ? head : head / group;
  const int own = tile * kOwn;
  const auto q_rows = [&](int h) {
    return Rows<const BFloat16>{x.qkv + s.q_at(b, h), s.qkv_width()};
  };
  const auto dy_rows = [&](int h) {
    return Rows<const BFloat16>{x.dy + s.y_at(b, h), s.y_width()};
  };
  const Rows<const BFloat16> k_rows{x.qkv + s.k_at(b, g), s.qkv_width()};
  const Rows<const BFloat16> v_rows{x.qkv + s.v_at(b, g), s.qkv_width()};

  // What there is to walk.
  const int begin = kOwnKeys && s.causal ? own / kOther * kOther : 0;
  const int end = !kOwnKeys && s.causal ? min(own + kOwn, tokens) : tokens;
  const int steps_a_head = (end - begin + kOther - 1) / kOther;
  const int num_steps = kOwnKeys ? steps_a_head * group : steps_a_head;
  const auto other_at = [&](int step) { return begin + step % steps_a_head * kOther; };
  const auto head_at = [&](int step) { return kOwnKeys ? g * group + step / steps_a_head : head; };

  auto* own_first = engine::dynamic_shared<BFloat16>();     // k or q
  BFloat16* own_second = own_first + kOwn * kPitch<kSize>;  // v or dy
  BFloat16* others = own_second + kOwn * kPitch<kSize>;
  auto* stats = reinterpret_cast<float*>(others + 4 * Tiles::kTileNumel);
  const auto other_first = [&](int step) { return others + step % 2 * (2 * Tiles::kTileNumel); };
  const auto load = [&](int step) {
    const int h = head_at(step), other = other_at(step);
    BFloat16* first = other_first(step);
    load_tile<kVector, kOther, kSize>(first, kOwnKeys ? q_rows(h) : k_rows, other, tokens,
                                      head_size);
    load_tile<kVector, kOther, kSize>(first + Tiles::kTileNumel, kOwnKeys ? dy_rows(h) : v_rows,
                                      other, tokens, head_size);
    cp_async_commit();
  };
  const auto stats_of = [&](int h, int query) {
    return load_stats(x.lse + s.lse_at(b, h), x.delta + s.lse_at(b, h), query, tokens);
  };
  // Statistics of the queries walked: fetched a step ahead by one thread each.
  const auto fetch_stats = [&](int step) {
    const int i = static_cast<int>(threadIdx.x);
    return kOwnKeys && i < kOther ? stats_of(head_at(step), other_at(step) + i) : QueryStats{};
  };

  const int warp_own = own + warp_id() * kM * 16;
  const BFloat16* warp_first = own_first + warp_id() * kM * 16 * kPitch<kSize>;
  const BFloat16* warp_second = own_second + warp_id() * kM * 16 * kPitch<kSize>;
  const float scale_log2 = s.scale * kLog2E;
  QueryStats own_stats[kM][2];
  if constexpr (!kOwnKeys) {
    for (int m = 0; m < kM; ++m)
      for (int half = 0; half < 2; ++half)
        own_stats[m][half] = stats_of(head, warp_own + m * 16 + lane / 4 + half * 8);
  }
  float dfirst[kM][kSize / 8][4] = {};   // dk or dq
  float dsecond[kM][kSize / 8][4] = {};  // dv

  load_tile<kVector, kOwn, kSize>(own_first, kOwnKeys ? k_rows : q_rows(head), own, tokens,
                                  head_size);
  load_tile<kVector, kOwn, kSize>(own_second, kOwnKeys ? v_rows : dy_rows(head), own, tokens,
                                  head_size);
  load(0);
  QueryStats next = fetch_stats(0);
  for (int step = 0; step < num_steps; ++step) {
    float* step_stats = stats + step % 2 * (2 * kOther);
    if (kOwnKeys && threadIdx.x < kOther) {
      step_stats[threadIdx.x] = next.lse_log2;
      step_stats[threadIdx.x + kOther] = next.delta;
    }
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles are here, and nobody reads those before any more
    if (step + 1 < num_steps) {
      load(step + 1);
      next = fetch_stats(step + 1);
    }
#pragma unroll 1
    for (int at = 0; at < kOther; at += kChunk) {
      const int other = other_at(step) + at;
      if (other >= tokens || warp_own >= tokens) break;
      if (s.causal && (kOwnKeys ? other + kChunk <= warp_own : other >= warp_own + kM * 16))
        continue;
      const BFloat16* first = other_first(step) + at * kPitch<kSize>;
      const BFloat16* second = first + Tiles::kTileNumel;
      const auto stats_at = [&](int m, int n, int e) {
        if constexpr (!kOwnKeys) return own_stats[m][e / 2];
        const int i = at + n * 8 + lane % 4 * 2 + e % 2;
        return QueryStats{step_stats[i], step_stats[i + kOther]};
      };
      float p[kM][kN][4], ds[kM][kN][4];
      multiply_transposed<kSize>(p, warp_first, first);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            p[m][n][e] = exp2_approx(fmaf(p[m][n][e], scale_log2, -stats_at(m, n, e).lse_log2));
      const bool at_diagonal =
          s.causal && (kOwnKeys ? other < warp_own + kM * 16 : other + kChunk > warp_own);
      if (at_diagonal || other + kChunk > tokens) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = warp_own + m * 16 + lane / 4 + e / 2 * 8;
              const int j = other + n * 8 + lane % 4 * 2 + e % 2;
              if (j >= tokens || (s.causal && (kOwnKeys ? j < i : j > i))) p[m][n][e] = 0;
            }
          }
        }
      }
      if constexpr (kOwnKeys) multiply_add<kSize>(dsecond, p, second);
      multiply_transposed<kSize>(ds, warp_second, second);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - stats_at(m, n, e).delta);
      multiply_add<kSize>(dfirst, ds, first);
    }
  }
  const std::int64_t first_at = kOwnKeys ? s.k_at(b, g) : s.q_at(b, head);
  store_rows<kVector, kSize>(Rows<BFloat16>{x.dqkv + first_at, s.qkv_width()}, dfirst, s.scale,
                             warp_own, tokens, head_size, x.accumulate);
  if constexpr (kOwnKeys) {
    store_rows<kVector, kSize>(Rows<BFloat16>{x.dqkv + s.v_at(b, g), s.qkv_width()}, dsecond, 1,
                               warp_own, tokens, head_size, x.accumulate);
  }
}

}  // namespace tessera::ops::flash

// Attention backward in bf16. See [Note: attention fragments].
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention_cuda.h"
#include "ops/attention_tile.cuh"
#include "ops/turns.cuh"

namespace tessera::ops::flash {

// [Note: deterministic attention backward]
// With p = exp(scale * q k^T - lse) and ds = p * (dy v^T - delta), delta = rowsum(dy * y):
//   dv = p^T dy,  dk = scale * ds^T q,  dq = scale * ds k.
// A block owns kKeys keys of a kv head and walks the queries of every head of its group, kQueries
// at a time: dk and dv, sums over queries, stay in registers. dq is a sum over keys, and so over
// blocks: they add to it in f32 by turns ([Note: turns]), in the order of keys. The first assigns,
// the last takes the sum to dqkv. The turns are those of a warp with the same warp of other blocks,
// which compute the same part of a tile's dq: they cost no barrier.
//
// Queries are walked from the last tile to the first: then all blocks of a head begin with the same
// tile, causal or not, and each is after the one before it by an addition, not by a tile. Tickets
// number a key tile of kHeadsTogether heads before the next one of any of them, so that a block
// starts after its predecessor and rarely waits, and what they share is still in L2.
//
// Where documents share a row, a block begins with the last tile of its last key's document, and
// the first to add to a tile of dq is the block with the first key of the document of the tile's
// first query. Both follow from where documents begin, which never falls along a row, so that who
// adds and who waits agree.
//
// The other way is two kernels, one that owns keys and one that owns queries, neither of which adds
// to memory (attention_f32.cuh): seven products in place of five, and exponentials twice. What
// bounds both is shared memory, which is busy for a quarter less here (docs/gpu.md counts it). On
// the other side there are T * D f32 of workspace a head, and what is added to it in L2. A block
// takes 93 KiB of shared memory for heads of 64 (two fit an SM of sm_90, one one of sm_80) and 75
// for heads of 128.

/// What a block owns.
struct KeyTile {
  int tile, g, b;  ///< of a kv head of a sample
};

template <int kSize>
struct BackwardTiles {
  static constexpr int kM = kSize > 64 ? 1 : 2;
  static constexpr int kKeys = kWarps * kM * 16;
  static constexpr int kQueries = kSize > 64 ? 32 : 64;
  static constexpr int kChunk = 32;  // queries whose scores a warp holds at a time
  static constexpr int kTileNumel = kQueries * kPitch<kSize>;
  static constexpr int kSlopePitch = kQueries + 8;
  // A warp's part of a tile's dq: half of the queries and of the head.
  static constexpr int kPartQueries = kQueries / 2, kPartSize = kSize / 2;
  static constexpr std::size_t kSharedNbytes =
      (2 * kKeys * kPitch<kSize> + 4 * kTileNumel + kKeys * kSlopePitch) * sizeof(BFloat16) +
      4 * kQueries * sizeof(float) + sizeof(KeyTile);

  static std::int64_t num_query_tiles(const AttentionLayout& s) {
    return s.batch * s.heads * ((s.tokens + kQueries - 1) / kQueries);
  }
};

inline constexpr int kHeadsTogether = 16;

struct BackwardTensors {
  const BFloat16 *qkv, *dy;
  const float *lse, *delta;
  BFloat16* dqkv;
  bool accumulate;
  float* column_sums = nullptr;  ///< of dqkv, in parts; null: none. Of flash_wgmma alone
  float* dq = nullptr;           ///< a tile of queries after the other, in the order of fragments
  unsigned* turns = nullptr;     ///< of each warp for each of these tiles
  unsigned* ticket = nullptr;    ///< 0 like `turns` before the launch
};

/// log-sum-exp and delta of a query; such that p = 0 where there is none. Whoever fetches them
/// ahead computes with them only when they are needed, since that waits for them.
struct QueryStats {
  float lse = INFINITY, delta = 0;
};

__device__ inline QueryStats load_stats(const float* lse, const float* delta, int query,
                                        int tokens) {
  if (query >= tokens) return {};
  return {lse[query], delta[query]};
}

/// The key tile with this ticket, of gridDim.x tiles in each of gridDim.y heads of gridDim.z
/// samples. A tile has a higher ticket than those before it of its head.
__device__ inline KeyTile key_tile_of(unsigned ticket) {
  const unsigned together = kHeadsTogether * gridDim.x, heads = gridDim.y * gridDim.z;
  const unsigned first = ticket / together * kHeadsTogether, at = ticket % together;
  const unsigned count = min(heads - first, unsigned{kHeadsTogether});
  const unsigned head = first + at % count;
  return {static_cast<int>(at / count), static_cast<int>(head % gridDim.y),
          static_cast<int>(head / gridDim.y)};
}

/// Adds what this block's keys contribute to a warp's part of dq of a tile of a head's queries.
/// `slopes`: ds, keys by queries.
template <bool kVector, int kSize, class Layout>
__device__ void add_dq(const Layout& s, const BackwardTensors& x, int b, int h, int tile,
                       int key_tile, const BFloat16* keys, const BFloat16* slopes) {
  using Tiles = BackwardTiles<kSize>;
  constexpr int kKeys = Tiles::kKeys, kQueries = Tiles::kQueries;
  constexpr int kM = Tiles::kPartQueries / 16, kN = Tiles::kPartSize / 8;
  static_assert(kKeys % kQueries == 0 && kWarps == 4);
  const int tokens = static_cast<int>(s.tokens);
  const int part_row = warp_id() / 2 * Tiles::kPartQueries;
  const int part_column = warp_id() % 2 * Tiles::kPartSize;
  const int query = tile * kQueries + part_row, key = key_tile * kKeys;
  if (query >= tokens) return;
  // After these no query of this part sees a key, and no slope was written.
  const int end = s.causal ? min(query + Tiles::kPartQueries, tokens) : tokens;
  float dq[kM][kN][4];
  multiply_left_transposed<Tiles::kSlopePitch, kPitch<kSize>, Tiles::kM * 16>(
      dq, slopes + part_row, keys + part_column, min(end - key, kKeys));

  const int first = s.first_key(b, tile * kQueries) / kKeys;
  const int last = s.causal ? tile * kQueries / kKeys : (tokens - 1) / kKeys;
  const std::int64_t num_tiles = (tokens + kQueries - 1) / kQueries;
  const std::int64_t at = (b * s.heads + h) * num_tiles + tile;
  unsigned* turn = x.turns + at * kWarps + warp_id();
  float* sums = x.dq + at * (kQueries * kSize) + threadIdx.x * 4;
  const auto sum_at = [&](int m, int n) { return sums + (m * kN + n) * (kThreads * 4); };
  if (key_tile > first) await_turn(turn, static_cast<unsigned>(key_tile));
  if (key_tile < last) {
    if (key_tile == first) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n) assign_in_l2(sum_at(m, n), dq[m][n]);
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n) add_in_l2(sum_at(m, n), dq[m][n]);
    }
    end_turn(turn, static_cast<unsigned>(key_tile));
    return;
  }
  if (key_tile > first) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) add_from_l2(dq[m][n], sum_at(m, n));
  }
  store_rows<kVector>(Rows<BFloat16>{x.dqkv + s.q_at(b, h) + part_column, s.qkv_width()}, dq,
                      s.scale, query, tokens, static_cast<int>(s.head_size) - part_column,
                      x.accumulate);
}

/// One block for kKeys keys of a kv head.
template <bool kVector, int kSize, class Layout>
__global__ void __launch_bounds__(kThreads) backward_kernel(Layout s, BackwardTensors x) {
  using Tiles = BackwardTiles<kSize>;
  constexpr int kM = Tiles::kM, kKeys = Tiles::kKeys, kQueries = Tiles::kQueries;
  constexpr int kChunk = Tiles::kChunk, kN = kChunk / 8;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int group = static_cast<int>(s.group()), lane = lane_id();

  auto* keys = engine::dynamic_shared<BFloat16>();
  BFloat16* values = keys + kKeys * kPitch<kSize>;
  BFloat16* others = values + kKeys * kPitch<kSize>;  // q and dy, two of each
  BFloat16* slopes = others + 4 * Tiles::kTileNumel;  // ds, keys by queries
  auto* stats = reinterpret_cast<float*>(slopes + kKeys * Tiles::kSlopePitch);
  // What the block owns: read where it is needed, since registers are scarce.
  auto* mine = reinterpret_cast<KeyTile*>(stats + 4 * kQueries);
  if (threadIdx.x == 0) *mine = key_tile_of(draw_ticket(x.ticket));
  __syncthreads();

  const int own = mine->tile * kKeys;
  const auto q_at = [&](int step) { return others + step % 2 * (2 * Tiles::kTileNumel); };
  const auto load = [&](int step, int h, int query) {
    const Rows<const BFloat16> q_rows{x.qkv + s.q_at(mine->b, h), s.qkv_width()};
    const Rows<const BFloat16> dy_rows{x.dy + s.y_at(mine->b, h), s.y_width()};
    load_tile<kVector, kQueries, kSize>(q_at(step), q_rows, query, tokens, head_size);
    load_tile<kVector, kQueries, kSize>(q_at(step) + Tiles::kTileNumel, dy_rows, query, tokens,
                                        head_size);
    cp_async_commit();
  };
  // Statistics of queries: fetched a step ahead by one thread each.
  const auto fetch_stats = [&](int h, int query) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kQueries) return QueryStats{};
    const std::int64_t at = s.lse_at(mine->b, h);
    return load_stats(x.lse + at, x.delta + at, query + i, tokens);
  };

  const int warp_row = warp_id() * kM * 16, warp_own = own + warp_row;
  const BFloat16* warp_keys = keys + warp_row * kPitch<kSize>;
  const BFloat16* warp_values = values + warp_row * kPitch<kSize>;
  const float scale_log2 = s.scale * kLog2E;
  float dk[kM][kSize / 8][4] = {}, dv[kM][kSize / 8][4] = {};

  load_tile<kVector, kKeys, kSize>(
      keys, Rows<const BFloat16>{x.qkv + s.k_at(mine->b, mine->g), s.qkv_width()}, own, tokens,
      head_size);
  load_tile<kVector, kKeys, kSize>(
      values, Rows<const BFloat16>{x.qkv + s.v_at(mine->b, mine->g), s.qkv_width()}, own, tokens,
      head_size);
  // The queries to walk: the tiles of each head, the last first.
  const int last_query = s.end_query(mine->b, min(own + kKeys, tokens) - 1) - 1;
  const int last_tile = last_query / kQueries * kQueries;
  int h = mine->g * group, tile = last_tile;
  load(0, h, tile);
  QueryStats next = fetch_stats(h, tile);
#pragma unroll 1
  for (int step = 0; h < (mine->g + 1) * group; ++step) {
    float* step_stats = stats + step % 2 * (2 * kQueries);
    if (threadIdx.x < kQueries) {
      step_stats[threadIdx.x] = next.lse * kLog2E;
      step_stats[threadIdx.x + kQueries] = next.delta;
    }
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles are here, and nobody reads those before any more
    const bool is_first = tile == (s.causal ? own : 0);
    const int next_h = is_first ? h + 1 : h, next_tile = is_first ? last_tile : tile - kQueries;
    if (next_h < (mine->g + 1) * group) {
      load(step + 1, next_h, next_tile);
      next = fetch_stats(next_h, next_tile);
    }
#pragma unroll 1
    for (int at = 0; at < kQueries; at += kChunk) {
      const int query = tile + at;
      if (query >= tokens || warp_own >= tokens) break;
      if (s.causal && query + kChunk <= warp_own) continue;
      const BFloat16* q = q_at(step) + at * kPitch<kSize>;
      const BFloat16* dy = q + Tiles::kTileNumel;
      const auto stat = [&](int n, int e) { return at + n * 8 + lane % 4 * 2 + e % 2; };
      float p[kM][kN][4], ds[kM][kN][4];
      multiply_transposed<kSize>(p, warp_keys, q);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            p[m][n][e] = exp2_approx(fmaf(p[m][n][e], scale_log2, -step_stats[stat(n, e)]));
      if ((s.causal && query < warp_own + kM * 16) || warp_own + kM * 16 > tokens ||
          (Layout::kHasDocuments &&
           s.first_key(mine->b, min(query + kChunk, tokens) - 1) > warp_own)) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = warp_own + m * 16 + lane / 4 + e / 2 * 8;
              const int j = query + n * 8 + lane % 4 * 2 + e % 2;
              if (i >= tokens || (s.causal && j < i) ||
                  (Layout::kHasDocuments && j < tokens && i < s.first_key(mine->b, j)))
                p[m][n][e] = 0;
            }
          }
        }
      }
      multiply_add<kSize>(dv, p, dy);
      multiply_transposed<kSize>(ds, warp_values, dy);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - step_stats[stat(n, e) + kQueries]);
      store_fragments<Tiles::kSlopePitch>(slopes + warp_row * Tiles::kSlopePitch + at, ds);
      multiply_add<kSize>(dk, ds, q);
    }
    __syncthreads();  // the slopes of all warps are there
    add_dq<kVector, kSize>(s, x, mine->b, h, tile / kQueries, mine->tile, keys, slopes);
    h = next_h, tile = next_tile;
  }
  store_rows<kVector>(Rows<BFloat16>{x.dqkv + s.k_at(mine->b, mine->g), s.qkv_width()}, dk, s.scale,
                      warp_own, tokens, head_size, x.accumulate);
  store_rows<kVector>(Rows<BFloat16>{x.dqkv + s.v_at(mine->b, mine->g), s.qkv_width()}, dv, 1,
                      warp_own, tokens, head_size, x.accumulate);
}

}  // namespace tessera::ops::flash

// Attention backward in bf16 by warpgroup products. See [Note: warpgroup products].
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention_backward.cuh"
#include "ops/attention_cuda.h"
#include "ops/attention_wgmma_sums.cuh"
#include "ops/attention_wgmma_tile.cuh"
#include "ops/turns.cuh"

namespace tessera::ops::flash_wgmma {

// [Note: attention backward by warpgroups]
// What is computed, and in which order dq is added up, is [Note: deterministic attention backward];
// here is who multiplies what. A block owns 128 keys of a kv head, 64 each of its two warpgroups,
// and walks tiles of kQueries queries, 64 at a time. With keys as rows, so that nothing has to be
// transposed, a warpgroup computes from operands in shared memory
//   p^T = exp(k q^T - lse), (64 keys, 64 queries), and  dp^T = v dy^T  beside it,
// and from these, rounded, as left operands in registers
//   dv += p^T dy  and  dk += ds^T q,  which stay in registers to the end.
// ds^T goes to shared memory, too, where it waits for the other warpgroup's: dq, 64 by 64, is a sum
// over all 128 keys, for which ds^T is the left operand, MN-major, and the keys are the right one.
// A warpgroup takes 64 of the tile's 128 queries, for heads of 64; or 64 of 128 columns of the
// head. Products into dk and dv are under way while those of the next queries and of dq are asked
// for: so probabilities and slopes that are rounded have registers of their own, 16 each beside 32
// each for p and dp, and what they read of q and dy stays until the step ends.

using flash::BackwardTensors;
using flash::KeyTile;
using flash::QueryStats;

template <int kSize>
struct BackwardTiles {
  static constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups, kWarps = kThreads / 32;
  static constexpr int kKeys = 64 * kWarpgroups, kQueries = kSize > 64 ? 64 : 128;
  using Keys = Tile<kKeys, kSize>;
  using Queries = Tile<kQueries, kSize>;
  using Slopes = Tile<kKeys, kQueries>;  // ds^T
  static constexpr std::size_t kSharedNbytes =
      kAtomNbytes + 2 * Keys::kNbytes + 4 * Queries::kNbytes + Slopes::kNbytes +
      4 * kQueries * sizeof(float) + kWarps * kSize * sizeof(float) + sizeof(KeyTile);

  static std::int64_t num_query_tiles(const AttentionLayout& s) {
    return s.batch * s.heads * ((s.tokens + kQueries - 1) / kQueries);
  }
  // The last key tile that adds to dq of a tile of queries.
  static __device__ int last_key_tile(const AttentionLayout& s, int tile) {
    return s.causal ? tile * kQueries / kKeys : (static_cast<int>(s.tokens) - 1) / kKeys;
  }
  // A warpgroup's part of that dq.
  static __device__ int part_row(int warpgroup) { return kQueries > 64 ? warpgroup * 64 : 0; }
  static __device__ int part_column(int warpgroup) { return kQueries > 64 ? 0 : warpgroup * 64; }
};

/// dq (64, 64) = ds k, over the first kKeys keys.
template <int kKeys>
__device__ void multiply_slopes(float (&dq)[8][4], std::uint64_t slopes, std::uint64_t keys) {
  wgmma_fence(dq);
#pragma unroll
  for (int k = 0; k < kKeys; k += 16)
    wgmma<true, true>(dq, advance(slopes, k * kPanelRowNbytes), advance(keys, k * kPanelRowNbytes),
                      k > 0);
  wgmma_commit();
  wgmma_wait<0>(dq);
}

/// Adds what this block's keys contribute to a warpgroup's part of dq of a tile of a head's
/// queries. The last to add stores dq, and each warp, if wanted, the sums of its columns. Returns
/// the turn that the warp has still to end, once what it added is likely to be there; null: none.
template <bool kVector, int kSize, class Layout>
__device__ unsigned* add_part_of_dq(const Layout& s, const BackwardTensors& x, int warpgroup, int b,
                                    int h, int tile, int key_tile, const BFloat16* keys,
                                    const BFloat16* slopes, float* warp_sums) {
  using Tiles = BackwardTiles<kSize>;
  constexpr int kKeys = Tiles::kKeys, kQueries = Tiles::kQueries;
  const int tokens = static_cast<int>(s.tokens);
  const int part_row = Tiles::part_row(warpgroup), part_column = Tiles::part_column(warpgroup);
  const int query = tile * kQueries + part_row, key = key_tile * kKeys;
  if (query >= tokens) return nullptr;
  // After these no query of this part sees a key, and no slope was written.
  const int end = (s.causal ? min(query + 64, tokens) : tokens) - key;
  const std::uint64_t left = operand_at(slopes + part_row * kKeys);
  const std::uint64_t right = operand_at(keys + part_column * kKeys);
  float dq[1][8][4];
  if (end > 64) {
    multiply_slopes<kKeys>(dq[0], left, right);
  } else {
    multiply_slopes<64>(dq[0], left, right);
  }

  const int first = s.first_key(b, tile * kQueries) / kKeys;
  const int last = Tiles::last_key_tile(s, tile);
  const std::int64_t num_tiles = (tokens + kQueries - 1) / kQueries;
  const std::int64_t at = (b * s.heads + h) * num_tiles + tile;
  unsigned* turn = x.turns + at * Tiles::kWarps + flash::warp_id();
  float* sums = x.dq + at * (kQueries * kSize) + threadIdx.x * 4;
  const auto sum_at = [&](int n) { return sums + n * (Tiles::kThreads * 4); };
  if (key_tile > first) await_turn(turn, static_cast<unsigned>(key_tile));
  if (key_tile < last) {
    if (key_tile == first) {
#pragma unroll
      for (int n = 0; n < 8; ++n) assign_in_l2(sum_at(n), dq[0][n]);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) add_in_l2(sum_at(n), dq[0][n]);
    }
    return turn;
  }
  if (key_tile > first) {
#pragma unroll
    for (int n = 0; n < 8; ++n) add_from_l2(dq[0][n], sum_at(n));
  }
  flash::store_rows<kVector>(Rows<BFloat16>{x.dqkv + s.q_at(b, h) + part_column, s.qkv_width()}, dq,
                             s.scale, query + flash::warp_id() % 4 * 16, tokens,
                             static_cast<int>(s.head_size) - part_column, x.accumulate);
  if (x.column_sums != nullptr) sum_rows<0>(warp_sums, dq[0]);
  return nullptr;
}

/// One block for kKeys keys of a kv head.
template <bool kVector, int kSize, class Layout>
__global__ void __launch_bounds__(BackwardTiles<kSize>::kThreads, 1)
    backward_kernel(Layout s, BackwardTensors x) {
  using Tiles = BackwardTiles<kSize>;
  using Keys = typename Tiles::Keys;
  using Queries = typename Tiles::Queries;
  constexpr int kThreads = Tiles::kThreads, kKeys = Tiles::kKeys, kQueries = Tiles::kQueries;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int group = static_cast<int>(s.group()), lane = flash::lane_id();

  BFloat16* keys = first_atom();
  BFloat16* values = keys + Keys::kNumel;
  BFloat16* others = values + Keys::kNumel;         // q and dy, two of each
  BFloat16* slopes = others + 4 * Queries::kNumel;  // ds, keys by queries
  auto* stats = reinterpret_cast<float*>(slopes + Tiles::Slopes::kNumel);
  float* sums = stats + 4 * kQueries;  // of the columns of what each warp stores
  // What the block owns: read where it is needed, since registers are scarce.
  auto* mine = reinterpret_cast<KeyTile*>(sums + Tiles::kWarps * kSize);
  if (threadIdx.x == 0) *mine = flash::key_tile_of(draw_ticket(x.ticket));
  __syncthreads();

  const int own = mine->tile * kKeys;
  const auto q_at = [&](int step) { return others + step % 2 * (2 * Queries::kNumel); };
  const auto load = [&](int step, int h, int query) {
    const Rows<const BFloat16> q_rows{x.qkv + s.q_at(mine->b, h), s.qkv_width()};
    const Rows<const BFloat16> dy_rows{x.dy + s.y_at(mine->b, h), s.y_width()};
    load_tile<kVector, kThreads, kQueries, kSize>(q_at(step), q_rows, query, tokens, head_size);
    load_tile<kVector, kThreads, kQueries, kSize>(q_at(step) + Queries::kNumel, dy_rows, query,
                                                  tokens, head_size);
    cp_async_commit();
  };
  // Statistics of queries: fetched a step ahead by one thread each.
  const auto fetch_stats = [&](int h, int query) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kQueries) return QueryStats{};
    const std::int64_t at = s.lse_at(mine->b, h);
    return flash::load_stats(x.lse + at, x.delta + at, query + i, tokens);
  };

  const int warpgroup = warpgroup_id(),
            group_own = own + warpgroup * 64;                  // the warpgroup's first key
  const int warp_own = group_own + flash::warp_id() % 4 * 16;  // the warp's
  const float scale_log2 = s.scale * flash::kLog2E;
  float dk[1][kSize / 8][4] = {}, dv[1][kSize / 8][4] = {};
  std::uint32_t p_rounded[4][4], ds_rounded[4][4];
  // A turn ends while products are under way: to tell others of sums waits for these to be there.
  unsigned* turn = nullptr;
  const auto end_last_turn = [&] {
    if (turn != nullptr) end_turn(turn, static_cast<unsigned>(mine->tile));
    turn = nullptr;
  };

  load_tile<kVector, kThreads, kKeys, kSize>(
      keys, Rows<const BFloat16>{x.qkv + s.k_at(mine->b, mine->g), s.qkv_width()}, own, tokens,
      head_size);
  load_tile<kVector, kThreads, kKeys, kSize>(
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
      step_stats[threadIdx.x] = next.lse * flash::kLog2E;
      step_stats[threadIdx.x + kQueries] = next.delta;
    }
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();  // this step's tiles are here, and nobody reads those before any more
    const bool is_first = tile == (s.causal ? own : 0);
    const int next_h = is_first ? h + 1 : h, next_tile = is_first ? last_tile : tile - kQueries;
    if (next_h < (mine->g + 1) * group) {
      load(step + 1, next_h, next_tile);
      next = fetch_stats(next_h, next_tile);
    }
#pragma unroll 1
    for (int at = 0; at < kQueries; at += 64) {
      const int query = tile + at;
      if (query >= tokens || group_own >= tokens) break;
      if (s.causal && query + 64 <= group_own) continue;
      const BFloat16* q = q_at(step) + at * kPanelColumns;
      const BFloat16* dy = q + Queries::kNumel;
      // Of queries 8 n + 2 (lane % 4) and the next.
      const auto stats_of = [&](int n, int which) {
        return *engine::as_wide<const float2>(step_stats + which * kQueries + at + n * 8 +
                                              lane % 4 * 2);
      };
      const std::uint64_t own_rows = advance(0, warpgroup * 64 * kPanelRowNbytes);
      float p[8][4], ds[8][4];
      wgmma_fence(p, ds);
      multiply_transposed<Keys, Queries, kSize>(p, operand_at(keys) + own_rows, operand_at(q));
      wgmma_commit();
      multiply_transposed<Keys, Queries, kSize>(ds, operand_at(values) + own_rows, operand_at(dy));
      wgmma_commit();
      end_last_turn();
      wgmma_wait<1>(p);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 lse = stats_of(n, 0);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p[n][e] = exp2_approx(fmaf(p[n][e], scale_log2, -(e % 2 == 0 ? lse.x : lse.y)));
      }
      if ((s.causal && query < warp_own + 16) || warp_own + 16 > tokens ||
          (Layout::kHasDocuments && s.first_key(mine->b, min(query + 64, tokens) - 1) > warp_own)) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = warp_own + lane / 4 + e / 2 * 8;
            const int j = query + n * 8 + lane % 4 * 2 + e % 2;
            if (i >= tokens || (s.causal && j < i) ||
                (Layout::kHasDocuments && j < tokens && i < s.first_key(mine->b, j)))
              p[n][e] = 0;
          }
        }
      }
      wgmma_wait<0>(ds);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 delta = stats_of(n, 1);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          ds[n][e] = p[n][e] * (ds[n][e] - (e % 2 == 0 ? delta.x : delta.y));
      }
      to_operand(p_rounded, p);
      to_operand(ds_rounded, ds);
      store_slopes(slopes + at * kKeys, warpgroup, ds_rounded);
      wgmma_fence(dv[0], dk[0], p_rounded, ds_rounded);
      multiply_add<Queries>(dv[0], p_rounded, operand_at(dy));
      multiply_add<Queries>(dk[0], ds_rounded, operand_at(q));
      wgmma_commit();
    }
    end_last_turn();  // where there was no product
    fence_async_proxy();
    __syncthreads();  // the slopes of both warpgroups are there
    turn = add_part_of_dq<kVector, kSize>(s, x, warpgroup, mine->b, h, tile / kQueries, mine->tile,
                                          keys, slopes, sums + flash::warp_id() * kSize);
    if (x.column_sums != nullptr && mine->tile == Tiles::last_key_tile(s, tile / kQueries)) {
      __syncthreads();  // the sums of all warps are there
      const int query = tile + Tiles::part_row(warpgroup);
      const int column = Tiles::part_column(warpgroup);
      if (query < tokens)
        sum_warps(column_sums_at(s, x, mine->b, query, h * head_size + column),
                  sums + warpgroup * 4 * kSize, kSize, min(64, head_size - column));
    }
    wgmma_wait<0>(dv[0], dk[0]);  // where there was no dq to wait for
    h = next_h, tile = next_tile;
  }
  end_last_turn();
  flash::store_rows<kVector>(Rows<BFloat16>{x.dqkv + s.k_at(mine->b, mine->g), s.qkv_width()}, dk,
                             s.scale, warp_own, tokens, head_size, x.accumulate);
  flash::store_rows<kVector>(Rows<BFloat16>{x.dqkv + s.v_at(mine->b, mine->g), s.qkv_width()}, dv,
                             1, warp_own, tokens, head_size, x.accumulate);
  if (x.column_sums == nullptr) return;
  const int column = static_cast<int>(s.heads + mine->g) * head_size;
  sum_columns<kSize>(s, x, mine->b, group_own, column, dk[0], sums);
  sum_columns<kSize>(s, x, mine->b, group_own, column + static_cast<int>(s.kv_heads) * head_size,
                     dv[0], sums);
}

}  // namespace tessera::ops::flash_wgmma

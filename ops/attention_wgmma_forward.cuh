// Attention forward in bf16 by warpgroup products. See [Note: warpgroup products].
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention_cuda.h"
#include "ops/attention_forward.cuh"
#include "ops/attention_wgmma_tile.cuh"

namespace tessera::ops::flash_wgmma {

// [Note: attention forward by warpgroups]
// A block owns 64 queries a warpgroup, and all of them walk the same tiles of 64 keys and values,
// one in use and one on its way. Scores are a product of two operands in shared memory; they become
// probabilities in registers, the left operand of the product with the values. A warpgroup waits
// for each of its products: ptxas serialises those that are under way from one pass of the loop to
// the next (its C7515). What keeps the tensor cores busy are the other warpgroups of the SM, which
// multiply while this one takes exponentials: for heads of 64, two blocks of two with up to 128
// registers a thread, for heads of 128, one block of three with up to 168.

template <int kSize>
struct ForwardTiles {
  static constexpr int kWarpgroups = kSize > 64 ? 3 : 2;
  static constexpr int kBlocks = kSize > 64 ? 1 : 2;  // on an SM
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kRows = 64 * kWarpgroups, kKeys = 64;
  using Queries = Tile<kRows, kSize>;
  using Keys = Tile<kKeys, kSize>;
  static constexpr std::size_t kSharedNbytes = kAtomNbytes + Queries::kNbytes + 4 * Keys::kNbytes;
};

/// One block for kRows queries of a head; blocks with the most keys come first, but for documents.
/// `lse` may be null.
template <bool kVector, int kSize, class Layout>
__global__ void __launch_bounds__(ForwardTiles<kSize>::kThreads, ForwardTiles<kSize>::kBlocks)
    forward_kernel(Layout s, const BFloat16* qkv, BFloat16* y, float* lse) {
  using Tiles = ForwardTiles<kSize>;
  using Keys = typename Tiles::Keys;
  constexpr int kThreads = Tiles::kThreads, kKeys = Tiles::kKeys;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::kRows;
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int g = h / static_cast<int>(s.group());
  const Rows<const BFloat16> q{qkv + s.q_at(b, h), s.qkv_width()};
  const Rows<const BFloat16> k{qkv + s.k_at(b, g), s.qkv_width()};
  const Rows<const BFloat16> v{qkv + s.v_at(b, g), s.qkv_width()};

  BFloat16* q_tile = first_atom();
  BFloat16* kv_tiles = q_tile + Tiles::Queries::kNumel;
  const auto k_tile = [&](int i) { return kv_tiles + i % 2 * (2 * Keys::kNumel); };
  const auto load = [&](int i) {
    load_tile<kVector, kThreads, kKeys, kSize>(k_tile(i), k, i * kKeys, tokens, head_size);
    load_tile<kVector, kThreads, kKeys, kSize>(k_tile(i) + Keys::kNumel, v, i * kKeys, tokens,
                                               head_size);
    cp_async_commit();
  };

  const int warpgroup = warpgroup_id();
  const int own_row = row + warpgroup * 64;  // the first of the warpgroup
  const int warp_row = own_row + flash::warp_id() % 4 * 16;
  const int end = s.causal ? min(row + Tiles::kRows, tokens) : tokens;
  const int own_end = own_row >= tokens ? 0 : s.causal ? own_row + 64 : tokens;
  const int first = s.first_key(b, row) / kKeys;  // tile
  const float scale_log2 = s.scale * flash::kLog2E;
  const std::uint64_t queries = operand_at(q_tile + warpgroup * 64 * kPanelColumns);
  float scores[1][kKeys / 8][4], out[1][kSize / 8][4] = {};
  std::uint32_t p[kKeys / 16][4];
  flash::OnlineSoftmax<1> softmax;

  load_tile<kVector, kThreads, Tiles::kRows, kSize>(q_tile, q, row, tokens, head_size);
  load(first);
#pragma unroll 1
  for (int key = first * kKeys; key < end; key += kKeys) {
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();  // this tile is here, and nobody reads the one before any more
    const int i = key / kKeys;
    if (key + kKeys < end) load(i + 1);
    // Nothing that this warpgroup's queries see.
    if (key >= own_end) continue;
    if (Layout::kHasDocuments && key + kKeys <= s.first_key(b, own_row)) continue;
    const BFloat16* keys = k_tile(i);
    wgmma_fence(scores[0]);
    multiply_transposed<typename Tiles::Queries, Keys, kSize>(scores[0], queries, operand_at(keys));
    wgmma_commit();
    wgmma_wait<0>(scores[0]);
    if (key + kKeys > (s.causal ? warp_row + 1 : tokens) ||
        (Layout::kHasDocuments && key < s.first_key(b, min(warp_row + 16, tokens) - 1))) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = warp_row + flash::lane_id() / 4 + half * 8;
        const int begin = query < tokens ? s.first_key(b, query) : 0;
        const int visible = s.causal ? query + 1 : tokens;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = key + n * 8 + flash::lane_id() % 4 * 2 + e;
            if (column >= visible || (Layout::kHasDocuments && column < begin))
              scores[0][n][half * 2 + e] = -INFINITY;
          }
        }
      }
    }
    softmax.update(scores, out, scale_log2);
    to_operand(p, scores[0]);
    wgmma_fence(out[0], p);
    multiply_add<Keys>(out[0], p, operand_at(keys + Keys::kNumel));
    wgmma_commit();
    wgmma_wait<0>(out[0]);
  }
  softmax.finish(out);
  flash::store_rows<kVector>(Rows<BFloat16>{y + s.y_at(b, h), s.y_width()}, out, 1, warp_row,
                             tokens, head_size, false);
  if (lse == nullptr || flash::lane_id() % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = warp_row + flash::lane_id() / 4 + half * 8;
    if (query < tokens)
      lse[s.lse_at(b, h) + query] = softmax.max[0][half] * s.scale + logf(softmax.sum[0][half]);
  }
}

}  // namespace tessera::ops::flash_wgmma

// Compiled for sm_90a alone: what follows is there on no other GPU.
#include <cstdint>
#include <type_traits>

#include "ops/attention_launch.cuh"
#include "ops/attention_wgmma.h"
#include "ops/attention_wgmma_backward.cuh"
#include "ops/attention_wgmma_forward.cuh"

namespace tessera::ops::flash_wgmma {

using engine::BFloat16;
using engine::Stream;
using engine::Tensor;

namespace {

template <int kSize>
using HeadSize = std::integral_constant<int, kSize>;

/// Calls `fn` with the size that heads are padded to.
template <class F>
void dispatch_head_size(std::int64_t head_size, F&& fn) {
  if (head_size <= 64) return fn(HeadSize<64>{});
  fn(HeadSize<128>{});
}

}  // namespace

void forward(const Stream& stream, const AttentionLayout& s, const Tensor& documents,
             const BFloat16* qkv, BFloat16* y, float* lse) {
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    using Tiles = ForwardTiles<kSize>;
    dispatch_layout(s, documents, [&](const auto& layout) {
      using Layout = std::decay_t<decltype(layout)>;
      engine::launch_kernel(
          stream, tile_shape(s, s.heads, Tiles::kRows, Tiles::kThreads, Tiles::kSharedNbytes),
          rows_are_packable(s, qkv, y) ? forward_kernel<true, kSize, Layout>
                                       : forward_kernel<false, kSize, Layout>,
          layout, qkv, y, lse);
    });
  });
}

BackwardWorkspace backward_workspace(const AttentionLayout& s) {
  BackwardWorkspace workspace{};
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    using Tiles = BackwardTiles<kSize>;
    const std::int64_t tiles = Tiles::num_query_tiles(s);
    // A sum of one addend needs no room.
    const bool adds = s.tokens > Tiles::kKeys;
    workspace = {tiles * Tiles::kWarps, adds ? tiles * Tiles::kQueries * kSize : 0};
  });
  return workspace;
}

void backward(const Stream& stream, const AttentionLayout& s, const Tensor& documents,
              const flash::BackwardTensors& x) {
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    using Tiles = BackwardTiles<kSize>;
    dispatch_layout(s, documents, [&](const auto& layout) {
      using Layout = std::decay_t<decltype(layout)>;
      engine::launch_kernel(
          stream, tile_shape(s, s.kv_heads, Tiles::kKeys, Tiles::kThreads, Tiles::kSharedNbytes),
          rows_are_packable(s, x.qkv, x.dy, x.dqkv) ? backward_kernel<true, kSize, Layout>
                                                    : backward_kernel<false, kSize, Layout>,
          layout, x);
    });
  });
}

}  // namespace tessera::ops::flash_wgmma

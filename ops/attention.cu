#include <cstdint>
#include <type_traits>

#include "ops/attention_backward.cuh"
#include "ops/attention_cuda.h"
#include "ops/attention_f32.cuh"
#include "ops/attention_forward.cuh"

namespace tessera::ops {

using engine::BFloat16;
using engine::Category;
using engine::DType;
using engine::LaunchShape;
using engine::Memory;
using engine::Packed;
using engine::Stream;
using engine::Tensor;

namespace {

template <int kSize>
using HeadSize = std::integral_constant<int, kSize>;

/// Calls `fn` with the size that heads are padded to.
template <class F>
void dispatch_head_size(std::int64_t head_size, F&& fn) {
  if (head_size <= 32) return fn(HeadSize<32>{});
  if (head_size <= 64) return fn(HeadSize<64>{});
  if (head_size <= 96) return fn(HeadSize<96>{});
  fn(HeadSize<128>{});
}

/// Can every row of every head be moved 16 bytes at a time?
template <class... T>
bool rows_are_packable(const AttentionLayout& s, const T*... pointers) {
  return s.head_size % Packed<BFloat16>::kNumel == 0 && engine::are_packable(pointers...);
}

/// One block for each `rows` tokens of each of `heads`.
LaunchShape tile_shape(const AttentionLayout& s, std::int64_t heads, int rows, int num_threads,
                       std::size_t shared_nbytes) {
  const std::int64_t tiles = (s.tokens + rows - 1) / rows;
  return {.grid = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(heads),
                       static_cast<unsigned>(s.batch)),
          .block = dim3(static_cast<unsigned>(num_threads)),
          .shared_nbytes = shared_nbytes};
}

/// delta (B, H, T) = rowsum(dy * y) of the heads in y, dy (B, T, H * D). Half a warp a row; each of
/// its lanes sums what is 16 bytes wide, so that bits do not depend on how the bytes are fetched.
/// Clears `num_counters` of `counters`, at most a thread each, for the kernel behind it.
template <class T, bool kVector>
__global__ void delta_kernel(AttentionLayout s, const T* y, const T* dy, float* delta,
                             unsigned* counters, std::int64_t num_counters) {
  constexpr int kLanes = 16, kWidth = Packed<T>::kNumel;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (engine::stride_begin() < num_counters) counters[engine::stride_begin()] = 0;
  const std::int64_t row = engine::stride_begin() / kLanes;  // of (B, T, H)
  const bool inside = row < s.batch * s.tokens * s.heads;
  float sum = 0;
  for (std::int64_t c = lane * kWidth; inside && c < s.head_size; c += kLanes * kWidth) {
    const std::int64_t at = row * s.head_size + c;
    Packed<T> a{}, b{};
    if constexpr (kVector) {
      a = Packed<T>::load(y + at);
      b = Packed<T>::load(dy + at);
    } else {
      for (int e = 0; e < kWidth && c + e < s.head_size; ++e)
        a.values[e] = y[at + e], b.values[e] = dy[at + e];
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      sum = fmaf(engine::to_f32(a.values[e]), engine::to_f32(b.values[e]), sum);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (!inside || lane != 0) return;
  const std::int64_t h = row % s.heads, token = row / s.heads;
  delta[s.lse_at(token / s.tokens, h) + token % s.tokens] = sum;
}

template <class T>
void compute_delta(const Stream& stream, const AttentionLayout& s, const Tensor& y,
                   const Tensor& dy, float* delta, unsigned* counters = nullptr,
                   std::int64_t num_counters = 0) {
  const T *y_data = y.data<T>(), *dy_data = dy.data<T>();
  const bool vector = s.head_size % Packed<T>::kNumel == 0 && engine::are_packable(y_data, dy_data);
  constexpr int kThreads = 256, kRows = kThreads / 16;
  const std::int64_t blocks = (s.batch * s.tokens * s.heads + kRows - 1) / kRows;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)};
  engine::launch_kernel(stream, shape, vector ? delta_kernel<T, true> : delta_kernel<T, false>, s,
                        y_data, dy_data, delta, counters, num_counters);
}

Tensor workspace(const Memory& memory, std::int64_t numel, DType dtype = DType::kF32) {
  return Tensor::empty(memory, {numel}, dtype, "attention.workspace", Category::kWorkspace);
}

template <int kSize>
void backward_f32(const Stream& stream, const AttentionLayout& s,
                  const flash_f32::BackwardTensors& x) {
  const auto shape = [&](std::int64_t heads) {
    return tile_shape(s, heads, flash_f32::kBackwardRows, flash_f32::kThreads,
                      flash_f32::kBackwardSharedNbytes<kSize>);
  };
  engine::launch_kernel(stream, shape(s.kv_heads), flash_f32::backward_kernel<kSize, true>, s, x);
  engine::launch_kernel(stream, shape(s.heads), flash_f32::backward_kernel<kSize, false>, s, x);
}

template <int kSize>
void backward_bf16(const Stream& stream, const Memory& memory, const AttentionLayout& s,
                   flash::BackwardTensors x, const Tensor& y, const Tensor& dy, float* delta) {
  using Tiles = flash::BackwardTiles<kSize>;
  // Counters are fewer than the threads that compute delta: kWarps for as many queries or more,
  // and one, where each query has 16 threads.
  const std::int64_t tiles = Tiles::num_query_tiles(s), num_counters = tiles * flash::kWarps + 1;
  const Tensor counters = workspace(memory, num_counters, DType::kI32);
  // A sum of one addend needs no room.
  const bool adds = s.tokens > Tiles::kKeys;
  const Tensor dq = workspace(memory, adds ? tiles * Tiles::kQueries * kSize : 0);
  x.dq = dq.data<float>();
  x.turns = reinterpret_cast<unsigned*>(counters.data<std::int32_t>());
  x.ticket = x.turns + tiles * flash::kWarps;
  compute_delta<BFloat16>(stream, s, y, dy, delta, x.turns, num_counters);
  engine::launch_kernel(
      stream, tile_shape(s, s.kv_heads, Tiles::kKeys, flash::kThreads, Tiles::kSharedNbytes),
      rows_are_packable(s, x.qkv, x.dy, x.dqkv) ? flash::backward_kernel<true, kSize>
                                                : flash::backward_kernel<false, kSize>,
      s, x);
}

}  // namespace

void attention_forward_cuda(const Stream& stream, const AttentionLayout& s, const Tensor& qkv,
                            const Tensor& y, const Tensor& lse) {
  float* lse_data = lse.defined() ? lse.data<float>() : nullptr;
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if (qkv.dtype() == DType::kF32) {
      engine::launch_kernel(stream,
                            tile_shape(s, s.heads, flash_f32::kForwardRows, flash_f32::kThreads,
                                       flash_f32::kForwardSharedNbytes<kSize>),
                            flash_f32::forward_kernel<kSize>, s, qkv.data<float>(), y.data<float>(),
                            lse_data);
      return;
    }
    using Tiles = flash::ForwardTiles<kSize>;
    const BFloat16* x = qkv.data<BFloat16>();
    BFloat16* out = y.data<BFloat16>();
    engine::launch_kernel(
        stream, tile_shape(s, s.heads, Tiles::kRows, flash::kThreads, Tiles::kSharedNbytes),
        rows_are_packable(s, x, out) ? flash::forward_kernel<true, kSize>
                                     : flash::forward_kernel<false, kSize>,
        s, x, out, lse_data);
  });
}

void attention_backward_cuda(const Stream& stream, const Memory& memory, const AttentionLayout& s,
                             const Tensor& qkv, const Tensor& y, const Tensor& lse,
                             const Tensor& dy, const Tensor& dqkv, bool accumulate) {
  const Tensor delta = workspace(memory, lse.numel());
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if (qkv.dtype() == DType::kF32) {
      compute_delta<float>(stream, s, y, dy, delta.data<float>());
      backward_f32<kSize>(stream, s,
                          {qkv.data<float>(), dy.data<float>(), lse.data<float>(),
                           delta.data<float>(), dqkv.data<float>(), accumulate});
    } else {
      backward_bf16<kSize>(stream, memory, s,
                           {.qkv = qkv.data<BFloat16>(),
                            .dy = dy.data<BFloat16>(),
                            .lse = lse.data<float>(),
                            .delta = delta.data<float>(),
                            .dqkv = dqkv.data<BFloat16>(),
                            .accumulate = accumulate},
                           y, dy, delta.data<float>());
    }
  });
}

}  // namespace tessera::ops

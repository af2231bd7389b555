// Attention forward and backward in f32, without tensor cores: for exact comparisons and for models
// that are kept in f32. The walk over tiles is that of the bf16 kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "engine/cuda_launch.cuh"
#include "ops/attention_cuda.h"

namespace tessera::ops::flash_f32 {

// A block is 16 x 16 threads. Thread (y, x) holds rows y + 16 i and columns x + 16 j of a product,
// so the 16 threads of a row are half a warp: what they leave in shared memory for the next product
// needs no more than __syncwarp.
inline constexpr int kSide = 16, kThreads = kSide * kSide;
inline constexpr int kForwardRows = 64, kBackwardRows = 32, kOther = 32;

/// Odd, so that a column of rows lies in different banks.
template <int kSize>
inline constexpr int kPitch = kSize + 1;

template <int kSize>
inline constexpr std::size_t kForwardSharedNbytes = ((kForwardRows + 2 * kOther) * kPitch<kSize> +
                                                     kForwardRows * kPitch<kOther>)*sizeof(float);
template <int kSize>
inline constexpr std::size_t kBackwardSharedNbytes = ((2 * kBackwardRows + 2 * kOther) *
                                                          kPitch<kSize> +
                                                      2 * kBackwardRows * kPitch<kOther> +
                                                      2 * kOther) *
                                                     sizeof(float);

__device__ inline int thread_x() { return static_cast<int>(threadIdx.x % kSide); }
__device__ inline int thread_y() { return static_cast<int>(threadIdx.x / kSide); }

/// Rows [row, row + kRows) of one head times `factor`, zeros where there are none.
template <int kRows, int kSize>
__device__ void load_tile(float* tile, const float* src, std::int64_t stride, int row, int num_rows,
                          int head_size, float factor = 1) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kSize; i += kThreads) {
    const int r = i / kSize, c = i % kSize;
    const bool inside = row + r < num_rows && c < head_size;
    tile[r * kPitch<kSize> + c] = inside ? factor * src[(row + r) * stride + c] : 0;
  }
}

/// acc += a b over `kDepth`, with a[row * a_pitch + k] and b[k * b_row + column * b_column].
template <int kDepth, int kI, int kJ>
__device__ void multiply_add(float (&acc)[kI][kJ], const float* a, int a_pitch, const float* b,
                             int b_row, int b_column) {
  a += thread_y() * a_pitch;
  b += thread_x() * b_column;
#pragma unroll 4
  for (int k = 0; k < kDepth; ++k) {
    float left[kI], right[kJ];
#pragma unroll
    for (int i = 0; i < kI; ++i) left[i] = a[i * kSide * a_pitch + k];
#pragma unroll
    for (int j = 0; j < kJ; ++j) right[j] = b[k * b_row + j * kSide * b_column];
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j) acc[i][j] = fmaf(left[i], right[j], acc[i][j]);
  }
}

/// Over the columns of both tiles: scores of rows `a` and rows `b`.
template <int kSize, int kI>
__device__ void multiply_transposed(float (&acc)[kI][kOther / kSide], const float* a,
                                    const float* b) {
  multiply_add<kSize>(acc, a, kPitch<kSize>, b, 1, kPitch<kSize>);
}

/// acc += p b, with p (rows, kOther), b (kOther, kSize).
template <int kSize, int kI>
__device__ void multiply_rows(float (&acc)[kI][kSize / kSide], const float* p, const float* b) {
  multiply_add<kOther>(acc, p, kPitch<kOther>, b, kPitch<kSize>, 1);
}

template <int kI, int kJ>
__device__ void store_tile(float* tile, int pitch, const float (&acc)[kI][kJ]) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
      tile[(thread_y() + i * kSide) * pitch + thread_x() + j * kSide] = acc[i][j];
}

template <int kI, int kJ>
__device__ void store_rows(float* dst, std::int64_t stride, const float (&acc)[kI][kJ],
                           float factor, int row, int num_rows, int head_size, bool accumulate) {
#pragma unroll
  for (int i = 0; i < kI; ++i) {
    const int r = row + thread_y() + i * kSide;
    if (r >= num_rows) return;
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      const int c = thread_x() + j * kSide;
      if (c >= head_size) break;
      float& to = dst[r * stride + c];
      to = accumulate ? to + factor * acc[i][j] : factor * acc[i][j];
    }
  }
}

/// One block for kForwardRows queries of a head. `lse` may be null.
template <int kSize, class Layout>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(Layout s, const float* qkv, float* y, float* lse) {
  constexpr int kI = kForwardRows / kSide, kJ = kOther / kSide;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kForwardRows;
  const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int g = h / static_cast<int>(s.group());

  auto* q = engine::dynamic_shared<float>();
  float* k = q + kForwardRows * kPitch<kSize>;
  float* v = k + kOther * kPitch<kSize>;
  float* p = v + kOther * kPitch<kSize>;
  load_tile<kForwardRows, kSize>(q, qkv + s.q_at(b, h), s.qkv_width(), row, tokens, head_size,
                                 s.scale);
  float out[kI][kSize / kSide] = {}, max[kI], sum[kI] = {};
  for (float& m : max) m = -INFINITY;
  const int end = s.causal ? min(row + kForwardRows, tokens) : tokens;
  for (int key = s.first_key(b, row) / kOther * kOther; key < end; key += kOther) {
    __syncthreads();  // nobody reads the tiles before any more
    load_tile<kOther, kSize>(k, qkv + s.k_at(b, g), s.qkv_width(), key, tokens, head_size);
    load_tile<kOther, kSize>(v, qkv + s.v_at(b, g), s.qkv_width(), key, tokens, head_size);
    __syncthreads();
    float scores[kI][kJ] = {};
    multiply_transposed<kSize>(scores, q, k);
#pragma unroll
    for (int i = 0; i < kI; ++i) {
      const int query = row + thread_y() + i * kSide;
      const int first = query < tokens ? s.first_key(b, query) : 0;
      float largest = max[i];
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        const int column = key + thread_x() + j * kSide;
        if (column >= tokens || column < first || (s.causal && column > query))
          scores[i][j] = -INFINITY;
        largest = fmaxf(largest, scores[i][j]);
      }
#pragma unroll
      for (int lanes = kSide / 2; lanes > 0; lanes /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      // Of a document that begins after this tile nothing is seen yet.
      const float subtracted = largest == -INFINITY ? 0 : largest;
      const float factor = expf(max[i] - subtracted);
      max[i] = largest;
      sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < kJ; ++j) sum[i] += scores[i][j] = expf(scores[i][j] - subtracted);
#pragma unroll
      for (int j = 0; j < kSize / kSide; ++j) out[i][j] *= factor;
    }
    store_tile(p, kPitch<kOther>, scores);
    __syncwarp();
    multiply_rows<kSize>(out, p, v);
  }
#pragma unroll
  for (int i = 0; i < kI; ++i) {
#pragma unroll
    for (int lanes = kSide / 2; lanes > 0; lanes /= 2)
      sum[i] += __shfl_xor_sync(~0u, sum[i], lanes);
    const float inverse = 1 / sum[i];
#pragma unroll
    for (int j = 0; j < kSize / kSide; ++j) out[i][j] *= inverse;
    const int query = row + thread_y() + i * kSide;
    if (lse != nullptr && thread_x() == 0 && query < tokens)
      lse[s.lse_at(b, h) + query] = max[i] + logf(sum[i]);
  }
  store_rows(y + s.y_at(b, h), s.y_width(), out, 1, row, tokens, head_size, false);
}

struct BackwardTensors {
  const float *qkv, *dy, *lse, *delta;
  float* dqkv;
  bool accumulate;
};

/// kOwnKeys: one block for kBackwardRows keys of a kv head walks the queries of every head of its
/// group, and computes dk and dv. Otherwise one for as many queries of a head walks the keys, and
/// computes dq. p and ds are computed twice, and no sum leaves its registers: in bf16 it is one
/// pass, see [Note: deterministic attention backward].
template <int kSize, bool kOwnKeys, class Layout>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(Layout s, BackwardTensors x) {
  constexpr int kOwn = kBackwardRows, kI = kOwn / kSide, kJ = kOther / kSide;
  const int tokens = static_cast<int>(s.tokens), head_size = static_cast<int>(s.head_size);
  const int group = static_cast<int>(s.group());
  const int tile = static_cast<int>(kOwnKeys ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  const int head = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const int g = kOwnKeys ? head : head / group;
  const int own = tile * kOwn;
  const int last_own = min(own + kOwn, tokens) - 1;
  const int first = kOwnKeys ? (s.causal ? own : 0) : s.first_key(b, own);
  const int begin = first / kOther * kOther;
  const int end = kOwnKeys ? s.end_query(b, last_own) : s.causal ? last_own + 1 : tokens;

  auto* own_first = engine::dynamic_shared<float>();           // k or q
  float* own_second = own_first + kOwn * kPitch<kSize>;        // v or dy
  float* other_first = own_second + kOwn * kPitch<kSize>;      // q or k
  float* other_second = other_first + kOther * kPitch<kSize>;  // dy or v
  float* p_tile = other_second + kOther * kPitch<kSize>;
  float* ds_tile = p_tile + kOwn * kPitch<kOther>;
  float* lse = ds_tile + kOwn * kPitch<kOther>;  // of this step's queries
  float* delta = lse + kOther;
  const auto load_first = [&]<int kRows>(float* to, int row, bool keys, int h) {
    load_tile<kRows, kSize>(to, x.qkv + (keys ? s.k_at(b, g) : s.q_at(b, h)), s.qkv_width(), row,
                            tokens, head_size);
  };
  const auto load_second = [&]<int kRows>(float* to, int row, bool keys, int h) {
    load_tile<kRows, kSize>(to, keys ? x.qkv + s.v_at(b, g) : x.dy + s.y_at(b, h),
                            keys ? s.qkv_width() : s.y_width(), row, tokens, head_size);
  };
  load_first.template operator()<kOwn>(own_first, own, kOwnKeys, head);
  load_second.template operator()<kOwn>(own_second, own, kOwnKeys, head);

  float dfirst[kI][kSize / kSide] = {}, dsecond[kI][kSize / kSide] = {};
  const int first_head = kOwnKeys ? g * group : head, num_heads = kOwnKeys ? group : 1;
  for (int h = first_head; h < first_head + num_heads; ++h) {
    for (int other = begin; other < end; other += kOther) {
      __syncthreads();  // nobody reads the tiles before any more
      load_first.template operator()<kOther>(other_first, other, !kOwnKeys, h);
      load_second.template operator()<kOther>(other_second, other, !kOwnKeys, h);
      if (threadIdx.x < kOther) {
        const int i = static_cast<int>(threadIdx.x), query = (kOwnKeys ? other : own) + i;
        lse[i] = query < tokens ? x.lse[s.lse_at(b, h) + query] : INFINITY;
        delta[i] = query < tokens ? x.delta[s.lse_at(b, h) + query] : 0;
      }
      __syncthreads();
      float p[kI][kJ] = {}, ds[kI][kJ] = {};
      multiply_transposed<kSize>(p, own_first, other_first);
      multiply_transposed<kSize>(ds, own_second, other_second);
#pragma unroll
      for (int i = 0; i < kI; ++i) {
#pragma unroll
        for (int j = 0; j < kJ; ++j) {
          const int r = thread_y() + i * kSide, c = thread_x() + j * kSide;
          const int query = kOwnKeys ? other + c : own + r, key = kOwnKeys ? own + r : other + c;
          const bool visible = key < tokens && (!s.causal || key <= query) &&
                               (query >= tokens || key >= s.first_key(b, query));
          const int at = kOwnKeys ? c : r;
          p[i][j] = visible ? expf(s.scale * p[i][j] - lse[at]) : 0;
          ds[i][j] = p[i][j] * (ds[i][j] - delta[at]);
        }
      }
      if constexpr (kOwnKeys) store_tile(p_tile, kPitch<kOther>, p);
      store_tile(ds_tile, kPitch<kOther>, ds);
      __syncwarp();
      if constexpr (kOwnKeys) multiply_rows<kSize>(dsecond, p_tile, other_second);
      multiply_rows<kSize>(dfirst, ds_tile, other_first);
    }
  }
  const std::int64_t first_at = kOwnKeys ? s.k_at(b, g) : s.q_at(b, head);
  store_rows(x.dqkv + first_at, s.qkv_width(), dfirst, s.scale, own, tokens, head_size,
             x.accumulate);
  if constexpr (kOwnKeys)
    store_rows(x.dqkv + s.v_at(b, g), s.qkv_width(), dsecond, 1, own, tokens, head_size,
               x.accumulate);
}

}  // namespace tessera::ops::flash_f32

#include <cstdint>
#include <type_traits>

#include "engine/cuda.h"
#include "ops/attention_backward.cuh"
#include "ops/attention_cuda.h"
#include "ops/attention_f32.cuh"
#include "ops/attention_forward.cuh"
#include "ops/attention_launch.cuh"
#include "ops/attention_wgmma.h"

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

constexpr int kDocumentThreads = 128;

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

/// delta (B, H, T) = rowsum(dy * y) of the heads in y, dy (B, T, H * D). Half a warp a row; each of
/// its lanes sums what is 16 bytes wide, so that bits do not depend on how the bytes are fetched.
/// Clears `num_counters` of `counters`, at most a thread each, for the kernel after it.
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

/// The major number of a stream's GPU, asked for once. A GPU that is not there (engine/meta.h) is
/// like the machine's first, or where there is none like the newest of those with code of their
/// own.
struct ComputeCapability {
  explicit ComputeCapability(const Stream& stream) {
    const bool is_meta = stream.device().is_meta;
    if (is_meta && engine::cuda::num_devices() == 0) return;
    engine::check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                              is_meta ? 0 : stream.device().index),
                       "cudaDeviceGetAttribute");
  }
  int major = 9;
};

/// Are these heads for the kernels of attention_sm90a.cu? Throws where they are asked for on a GPU
/// that cannot run them, whatever the heads.
bool uses_wgmma(const Stream& stream, CudaAttention kernels, const AttentionLayout& s,
                DType dtype) {
  if (kernels == CudaAttention::kMma) return false;
  if (kernels == CudaAttention::kWgmma) require_wgmma_cuda(stream);
  if (stream.state<ComputeCapability>().major != 9) return false;
  return dtype == DType::kBF16 && flash_wgmma::takes(s.head_size);
}

/// One block a sample, whose threads take as many tokens each: where a token's document begins is
/// the last token up to it that stands at 0, and where it ends the first one after it.
__global__ void documents_kernel(std::int32_t* begins, std::int32_t* ends,
                                 const std::int32_t* positions, int tokens) {
  __shared__ int last[kDocumentThreads], first[kDocumentThreads];  // beginnings of each thread's
  const int thread = static_cast<int>(threadIdx.x);
  const int each = (tokens + kDocumentThreads - 1) / kDocumentThreads;
  const int own = min(thread * each, tokens), own_end = min(own + each, tokens);
  const std::int64_t sample = static_cast<std::int64_t>(blockIdx.x) * tokens;
  begins += sample, ends += sample, positions += sample;
  last[thread] = 0;
  first[thread] = tokens;
  for (int t = own; t < own_end; ++t) {
    if (positions[t] != 0) continue;
    last[thread] = t;
    first[thread] = min(first[thread], t);
  }
  __syncthreads();
  int begin = 0, end = tokens;
  for (int other = 0; other < thread; ++other) begin = max(begin, last[other]);
  for (int other = thread + 1; other < kDocumentThreads; ++other) end = min(end, first[other]);
  for (int t = own; t < own_end; ++t) begins[t] = begin = positions[t] == 0 ? t : begin;
  for (int t = own_end - 1; t >= own; --t) {
    ends[t] = end;
    if (positions[t] == 0) end = t;
  }
}

Tensor workspace(const Memory& memory, std::int64_t numel, DType dtype = DType::kF32) {
  return Tensor::empty(memory, {numel}, dtype, "attention.workspace", Category::kWorkspace);
}

template <int kSize, class Layout>
void backward_f32(const Stream& stream, const Layout& s, const flash_f32::BackwardTensors& x) {
  const auto shape = [&](std::int64_t heads) {
    return tile_shape(s, heads, flash_f32::kBackwardRows, flash_f32::kThreads,
                      flash_f32::kBackwardSharedNbytes<kSize>);
  };
  engine::launch_kernel(stream, shape(s.kv_heads), flash_f32::backward_kernel<kSize, true, Layout>,
                        s, x);
  engine::launch_kernel(stream, shape(s.heads), flash_f32::backward_kernel<kSize, false, Layout>, s,
                        x);
}

/// Computes delta and clears the counters that the kernel after it needs, `num_turns` and one for
/// tickets. They are fewer than the threads that compute delta: at most a warp's for 8 queries, and
/// one, where each query has 16 threads.
Tensor prepare_turns(const Stream& stream, const Memory& memory, const AttentionLayout& s,
                     flash::BackwardTensors& x, const Tensor& y, const Tensor& dy, float* delta,
                     std::int64_t num_turns) {
  const Tensor counters = workspace(memory, num_turns + 1, DType::kI32);
  x.turns = reinterpret_cast<unsigned*>(counters.data<std::int32_t>());
  x.ticket = x.turns + num_turns;
  compute_delta<BFloat16>(stream, s, y, dy, delta, x.turns, num_turns + 1);
  return counters;
}

template <int kSize>
void backward_bf16(const Stream& stream, const Memory& memory, const AttentionLayout& s,
                   const Tensor& documents, flash::BackwardTensors x, const Tensor& y,
                   const Tensor& dy, float* delta) {
  using Tiles = flash::BackwardTiles<kSize>;
  const std::int64_t tiles = Tiles::num_query_tiles(s);
  const Tensor counters = prepare_turns(stream, memory, s, x, y, dy, delta, tiles * flash::kWarps);
  // A sum of one addend needs no room.
  const bool adds = s.tokens > Tiles::kKeys;
  const Tensor dq = workspace(memory, adds ? tiles * Tiles::kQueries * kSize : 0);
  x.dq = dq.data<float>();
  dispatch_layout(s, documents, [&](const auto& layout) {
    using Layout = std::decay_t<decltype(layout)>;
    engine::launch_kernel(
        stream, tile_shape(s, s.kv_heads, Tiles::kKeys, flash::kThreads, Tiles::kSharedNbytes),
        rows_are_packable(s, x.qkv, x.dy, x.dqkv) ? flash::backward_kernel<true, kSize, Layout>
                                                  : flash::backward_kernel<false, kSize, Layout>,
        layout, x);
  });
}

void backward_wgmma(const Stream& stream, const Memory& memory, const AttentionLayout& s,
                    const Tensor& documents, flash::BackwardTensors x, const Tensor& y,
                    const Tensor& dy, float* delta) {
  const flash_wgmma::BackwardWorkspace needs = flash_wgmma::backward_workspace(s);
  const Tensor counters = prepare_turns(stream, memory, s, x, y, dy, delta, needs.num_turns);
  const Tensor dq = workspace(memory, needs.dq_numel);
  x.dq = dq.data<float>();
  flash_wgmma::backward(stream, s, documents, x);
}

}  // namespace

void require_wgmma_cuda(const Stream& stream) {
  if (stream.device().is_meta) return;
  const int major = stream.state<ComputeCapability>().major;
  engine::require(major == 9,
                  "[attention] expected a GPU of compute capability 9.x for wgmma, got {}.x ({})",
                  major, to_string(stream.device()));
}

void attention_documents_cuda(const Stream& stream, const Tensor& documents,
                              const Tensor& positions) {
  auto* const begins = documents.data<std::int32_t>();
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(positions.dim(0))),
                          .block = dim3(kDocumentThreads)};
  engine::launch_kernel(stream, shape, documents_kernel, begins, begins + positions.numel(),
                        positions.data<std::int32_t>(), static_cast<int>(positions.dim(1)));
}

void attention_forward_cuda(const Stream& stream, CudaAttention kernels, const AttentionLayout& s,
                            const Tensor& documents, const Tensor& qkv, const Tensor& y,
                            const Tensor& lse) {
  float* lse_data = lse.defined() ? lse.data<float>() : nullptr;
  if (uses_wgmma(stream, kernels, s, qkv.dtype())) {
    flash_wgmma::forward(stream, s, documents, qkv.data<BFloat16>(), y.data<BFloat16>(), lse_data);
    return;
  }
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    dispatch_layout(s, documents, [&](const auto& layout) {
      using Layout = std::decay_t<decltype(layout)>;
      if (qkv.dtype() == DType::kF32) {
        engine::launch_kernel(stream,
                              tile_shape(s, s.heads, flash_f32::kForwardRows, flash_f32::kThreads,
                                         flash_f32::kForwardSharedNbytes<kSize>),
                              flash_f32::forward_kernel<kSize, Layout>, layout, qkv.data<float>(),
                              y.data<float>(), lse_data);
        return;
      }
      using Tiles = flash::ForwardTiles<kSize>;
      const BFloat16* x = qkv.data<BFloat16>();
      BFloat16* out = y.data<BFloat16>();
      engine::launch_kernel(
          stream, tile_shape(s, s.heads, Tiles::kRows, flash::kThreads, Tiles::kSharedNbytes),
          rows_are_packable(s, x, out) ? flash::forward_kernel<true, kSize, Layout>
                                       : flash::forward_kernel<false, kSize, Layout>,
          layout, x, out, lse_data);
    });
  });
}

Tensor empty_attention_sums(const Stream& stream, const Memory& memory, CudaAttention kernels,
                            const AttentionLayout& s, DType dtype) {
  if (!uses_wgmma(stream, kernels, s, dtype)) return {};
  return Tensor::empty(memory, {s.batch * flash_wgmma::parts_of_sample(s), s.qkv_width()},
                       DType::kF32, "column_sums", Category::kWorkspace);
}

void attention_backward_cuda(const Stream& stream, const Memory& memory, CudaAttention kernels,
                             const AttentionLayout& s, const Tensor& documents, const Tensor& qkv,
                             const Tensor& y, const Tensor& lse, const Tensor& dy,
                             const Tensor& dqkv, bool accumulate, const Tensor& column_sums) {
  const Tensor delta = workspace(memory, lse.numel());
  const bool wgmma = uses_wgmma(stream, kernels, s, qkv.dtype());
  dispatch_head_size(s.head_size, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if (qkv.dtype() == DType::kF32) {
      compute_delta<float>(stream, s, y, dy, delta.data<float>());
      const flash_f32::BackwardTensors x{qkv.data<float>(),   dy.data<float>(),   lse.data<float>(),
                                         delta.data<float>(), dqkv.data<float>(), accumulate};
      dispatch_layout(s, documents,
                      [&](const auto& layout) { backward_f32<kSize>(stream, layout, x); });
    } else {
      const flash::BackwardTensors tensors{
          .qkv = qkv.data<BFloat16>(),
          .dy = dy.data<BFloat16>(),
          .lse = lse.data<float>(),
          .delta = delta.data<float>(),
          .dqkv = dqkv.data<BFloat16>(),
          .accumulate = accumulate,
          .column_sums = column_sums.defined() ? column_sums.data<float>() : nullptr};
      (wgmma ? backward_wgmma : backward_bf16<kSize>)(stream, memory, s, documents, tensors, y, dy,
                                                      delta.data<float>());
    }
  });
}

}  // namespace tessera::ops

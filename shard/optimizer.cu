#include <algorithm>
#include <cmath>

#include "engine/cuda_launch.cuh"
#include "shard/optimizer_cuda.h"

namespace tessera::shard {
namespace {

constexpr int kNumThreads = 256;
constexpr int kPerThread = 4;  // 16 bytes of each array

enum Scalar { kScale, kSkip, kStepSize, kVScale };

struct SegmentRow {
  std::int64_t begin, numel, parameter, rank;
};

// Of clip_scale() in fsdp.cc, and whether the step is to be skipped.
__device__ bool write_scale(float* scalars, const int* norm, double mean_scale, double clip,
                            double max_norm) {
  if (norm != nullptr && max_norm > 0) {
    clip = fmin(1.0, max_norm / (static_cast<double>(__int_as_float(norm[0])) + 1e-6));
  }
  const bool skip = norm != nullptr && norm[1] != 0;
  scalars[kScale] = static_cast<float>(mean_scale * clip);
  scalars[kSkip] = skip ? 1 : 0;
  return !skip;
}

__global__ void sgd_scalars_kernel(float* scalars, const int* norm, double mean_scale, double clip,
                                   double max_norm) {
  write_scale(scalars, norm, mean_scale, clip, max_norm);
}

__global__ void adamw_scalars_kernel(float* scalars, const int* norm, double mean_scale,
                                     double clip, double max_norm, int* num_steps, double beta1,
                                     double beta2, double lr) {
  if (!write_scale(scalars, norm, mean_scale, clip, max_norm)) return;
  const double step = ++*num_steps;
  scalars[kStepSize] = static_cast<float>(lr / (1 - pow(beta1, step)));
  scalars[kVScale] = static_cast<float>(1 / sqrt(1 - pow(beta2, step)));
}

// Products and sums that are not contracted: the bits of the CPU.
__device__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ float add(float a, float b) { return __fadd_rn(a, b); }

// fn(i) for each element of this block's segment. Segments start at multiples of 256 bytes in the
// flat parameter, shards may cut them anywhere: so a thread takes 4 neighbours if they are aligned.
template <class F>
__device__ void for_each_element(const SegmentRow& segment, F fn) {
  const std::int64_t end = segment.begin + segment.numel;
  const std::int64_t aligned = (segment.begin + kPerThread - 1) / kPerThread * kPerThread;
  const std::int64_t thread = engine::stride_begin();
  if (thread == 0) {
    for (std::int64_t i = segment.begin; i < aligned && i < end; ++i) fn(i);
  }
  for (std::int64_t i = aligned + thread * kPerThread; i < end;
       i += engine::stride_step() * kPerThread) {
    const std::int64_t last = i + kPerThread < end ? i + kPerThread : end;
    for (std::int64_t j = i; j < last; ++j) fn(j);
  }
}

__global__ void sgd_kernel(float* __restrict p, float* __restrict v, const float* __restrict g,
                           const SegmentRow* table, const float* scalars, float lr,
                           float momentum) {
  if (scalars[kSkip] != 0) return;
  const float scale = scalars[kScale];
  for_each_element(table[blockIdx.y], [&](std::int64_t i) {
    float step = mul(g[i], scale);
    if (v != nullptr) v[i] = step = add(mul(momentum, v[i]), step);
    p[i] = add(p[i], -mul(lr, step));
  });
}

__global__ void adamw_kernel(float* __restrict p, float* __restrict m, float* __restrict v,
                             const float* __restrict g, const SegmentRow* table,
                             const float* scalars, float beta1, float beta2, float eps,
                             float keep_decayed) {
  if (scalars[kSkip] != 0) return;
  const float scale = scalars[kScale], step_size = scalars[kStepSize], v_scale = scalars[kVScale];
  const SegmentRow segment = table[blockIdx.y];
  const float keep = segment.rank >= 2 ? keep_decayed : 1.0f;
  const float one_minus_beta1 = 1 - beta1, one_minus_beta2 = 1 - beta2;
  for_each_element(segment, [&](std::int64_t i) {
    const float grad = mul(g[i], scale);
    m[i] = add(mul(beta1, m[i]), mul(one_minus_beta1, grad));
    v[i] = add(mul(beta2, v[i]), mul(one_minus_beta2, mul(grad, grad)));
    const float root = add(mul(__fsqrt_rn(v[i]), v_scale), eps);
    p[i] = add(mul(p[i], keep), -__fdiv_rn(mul(step_size, m[i]), root));
  });
}

// Calls launch(shape, rows), mostly once: a row of blocks for each segment, as many as the shard
// could fill.
template <class F>
void for_segments(const ShardCuda& shard, F launch) {
  constexpr std::int64_t kMaxRows = 65535;  // of a grid
  const auto* rows = reinterpret_cast<const SegmentRow*>(shard.table.raw());
  engine::LaunchShape shape =
      engine::stride_shape((shard.parameters.numel() + kPerThread - 1) / kPerThread, kNumThreads);
  for (std::int64_t row = 0; row < shard.table.dim(0); row += kMaxRows) {
    shape.grid.y = static_cast<unsigned>(std::min(shard.table.dim(0) - row, kMaxRows));
    launch(shape, rows + row);
  }
}

template <class T>
T* data_or_null(const engine::Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

}  // namespace

void sgd_scalars_cuda(const engine::Stream& stream, const engine::Tensor& scalars,
                      const ClipCuda& clip) {
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(1)}, sgd_scalars_kernel,
                        scalars.data<float>(), data_or_null<std::int32_t>(clip.norm),
                        clip.mean_scale, clip.clip, clip.max_norm);
}

void sgd_cuda(const engine::Stream& stream, const ShardCuda& shard, const engine::Tensor& velocity,
              float lr, float momentum) {
  for_segments(shard, [&](const engine::LaunchShape& shape, const SegmentRow* rows) {
    engine::launch_kernel(stream, shape, sgd_kernel, shard.parameters.data<float>(),
                          data_or_null<float>(velocity), shard.gradient_sums.data<float>(), rows,
                          shard.scalars.data<float>(), lr, momentum);
  });
}

void adamw_scalars_cuda(const engine::Stream& stream, const engine::Tensor& scalars,
                        const ClipCuda& clip, const engine::Tensor& num_steps,
                        const AdamWCuda& options) {
  engine::launch_kernel(stream, {.grid = dim3(1), .block = dim3(1)}, adamw_scalars_kernel,
                        scalars.data<float>(), data_or_null<std::int32_t>(clip.norm),
                        clip.mean_scale, clip.clip, clip.max_norm, num_steps.data<std::int32_t>(),
                        options.beta1, options.beta2, options.lr);
}

void adamw_cuda(const engine::Stream& stream, const ShardCuda& shard, const engine::Tensor& m,
                const engine::Tensor& v, const AdamWCuda& options) {
  const auto keep = static_cast<float>(1 - options.lr * options.weight_decay);
  for_segments(shard, [&](const engine::LaunchShape& shape, const SegmentRow* rows) {
    engine::launch_kernel(stream, shape, adamw_kernel, shard.parameters.data<float>(),
                          m.data<float>(), v.data<float>(), shard.gradient_sums.data<float>(), rows,
                          shard.scalars.data<float>(), static_cast<float>(options.beta1),
                          static_cast<float>(options.beta2), static_cast<float>(options.eps), keep);
  });
}

}  // namespace tessera::shard

// The kernels of optimizer.cc: one launch a flat shard. What depends on the norm and the number of
// steps is worked out on the device, so that nobody waits for the host.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::shard {

/// How the gradient becomes its clipped mean.
struct ClipCuda {
  double mean_scale;
  double clip = 1;           ///< used when `norm` is undefined
  engine::Tensor norm = {};  ///< (2) i32: GradNorm::on_device()
  double max_norm = 0;       ///< with `norm`: 0 means no clipping
};

/// What the update kernels read: kNumScalars f32. A step whose norm says that a gradient is not
/// finite changes nothing and does not count.
inline constexpr std::int64_t kNumScalars = 4;

/// One flat shard: tensors as in Flat, f32; `table` is Flat::segment_table.
struct ShardCuda {
  const engine::Tensor &parameters, &gradient_sums, &table, &scalars;
};

void sgd_scalars_cuda(const engine::Stream& stream, const engine::Tensor& scalars,
                      const ClipCuda& clip);
/// `velocity` may be undefined.
void sgd_cuda(const engine::Stream& stream, const ShardCuda& shard, const engine::Tensor& velocity,
              float lr, float momentum);

struct AdamWCuda {
  double beta1, beta2, eps, weight_decay, lr;  // lr rounded to f32
};
/// `num_steps` (1) i32 counts up.
void adamw_scalars_cuda(const engine::Stream& stream, const engine::Tensor& scalars,
                        const ClipCuda& clip, const engine::Tensor& num_steps,
                        const AdamWCuda& options);
void adamw_cuda(const engine::Stream& stream, const ShardCuda& shard, const engine::Tensor& m,
                const engine::Tensor& v, const AdamWCuda& options);

}  // namespace tessera::shard

// Kernels of softmax cross-entropy on a GPU. Private to ops.
//
//   cross_entropy_forward_cuda    logits -> stats and loss of each row, and dlogits if wanted
//   cross_entropy_mean_cuda       losses of the rows -> the loss, and rows.weight
//   cross_entropy_scales_cuda     dloss, rows.weight -> what a gradient is multiplied with
//   cross_entropy_gradient_cuda   logits, stats -> dlogits
//
// A target outside [0, V) that is not ignored is found by the kernel, which cannot throw: stats,
// loss and gradient of its row are NaN, and so is the mean.
#pragma once

#include "engine/gemm/gemm_cuda.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "ops/cross_entropy_rows.h"

namespace tessera::ops {

/// `logits` (n, V or more), f32 or bf16, are those of rows [first, first + n), not transposed;
/// columns from V on are neither read nor written. Writes their stats and their losses,
/// row_losses[0, n) f32. `dlogits`, unless null, of the same shape and dtype, maybe the same
/// memory: softmax - onehot, 0 for an ignored row.
void cross_entropy_forward_cuda(const engine::Stream& stream, const CrossEntropyRows& rows,
                                std::int64_t first, const engine::DeviceMatrix& logits,
                                float* row_losses, const engine::DeviceMatrix* dlogits);

/// What the gradient of row i is multiplied with: data[i * step], in device memory. Step 0: one
/// number for all.
struct RowScales {
  const float* data;
  std::int64_t step;
};

/// dlogits = (or +=) scale (softmax - onehot) of all rows, from the stats. `logits` and `dlogits`
/// as in cross_entropy_forward_cuda().
void cross_entropy_gradient_cuda(const engine::Stream& stream, const CrossEntropyRows& rows,
                                 const engine::DeviceMatrix& logits,
                                 const engine::DeviceMatrix& dlogits, const RowScales& scales,
                                 bool accumulate);

/// loss = the mean of row_losses (N) over rows that are not ignored, or their sum, added up in
/// double.
void cross_entropy_mean_cuda(const engine::Stream& stream, const CrossEntropyRows& rows,
                             const float* row_losses, float* loss);

/// scales = {dloss * weight, 0, 1}; see engine::DeviceProduct.
void cross_entropy_scales_cuda(const engine::Stream& stream, const CrossEntropyRows& rows,
                               const float* dloss, float* scales);

}  // namespace tessera::ops

// Sums of the columns of a matrix on a GPU, such as the gradient of a bias. Private to ops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

// [Note: sums of columns]
// Rows are cut into parts, a function of their number alone; first each part is summed, then the
// parts are, in order. A kernel that writes the matrix can do the first step while it has each
// element at hand, which saves reading all of it again: pointwise.cuh, normalize_backward.cu and
// attention_wgmma_backward.cuh, each with parts of its own, do so for gradients whose sums are
// wanted (GradTarget::wants_column_sums). What they add up are the elements as they are stored,
// rounded, so that it makes no difference but for the order.

/// How `rows` are cut: enough of them a part to pay for what is written.
struct RowParts {
  explicit RowParts(std::int64_t rows)
      : rows_each(std::max(kMinRows, (rows + kMaxParts - 1) / kMaxParts)),
        num((rows + rows_each - 1) / rows_each) {}

  static constexpr std::int64_t kMinRows = 128, kMaxParts = 256;
  std::int64_t rows_each, num;
};

/// For the sums of the parts of `x` (..., C): (parts, C) f32, uninitialised.
inline engine::Tensor empty_part_sums(const engine::Memory& memory, const engine::Tensor& x) {
  return engine::Tensor::empty(memory, {RowParts(x.shape().rows()).num, x.dim(-1)},
                               engine::DType::kF32, "column_sums", engine::Category::kWorkspace);
}

/// dst[j] = the sum of column j of x (..., C), or += it. x and dst f32 or bf16, any mix; sums are
/// f32 and rounded once. The order of additions is a function of the shape alone. Takes workspace
/// from `memory`, whose home is `stream`.
void column_sums_cuda(const engine::Stream& stream, const engine::Memory& memory,
                      const engine::GradTarget& dst, const engine::Tensor& x);

/// The first step alone, of `rows` times `cols` elements at `x`: sums (parts, cols), parts as
/// RowParts says.
void part_sums_cuda(const engine::Stream& stream, float* sums, engine::DType dtype, const void* x,
                    std::int64_t rows, std::int64_t cols);

/// The second step alone: x (parts, C) f32.
void sum_parts_cuda(const engine::Stream& stream, const engine::GradTarget& dst,
                    const engine::Tensor& x);

}  // namespace tessera::ops

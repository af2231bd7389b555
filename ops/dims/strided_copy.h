// Copies between boxes of elements that lie in tensors at strides: what slices, permutations and
// broadcasts are made of. Private to ops.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::ops {

inline constexpr int kMaxBoxRank = engine::Shape::kMaxRank;
using BoxDims = std::array<std::int64_t, kMaxBoxRank>;

/// Element (i0, i1, ...) of a box lies at begin + sum_k i_k strides[k] of the tensor. A stride of 0
/// repeats.
struct Box {
  engine::Tensor tensor;
  std::int64_t begin = 0;
  BoxDims strides = {};
};

/// to = from / divisor, or += with `accumulate`, of the boxes' first `rank` dimensions. The
/// tensors are f32 or bf16, of one dtype.
struct StridedCopy {
  int rank = 0;
  BoxDims dims = {};
  Box to;
  Box from;
  float divisor = 1;
  bool accumulate = false;
};

/// The strides of a tensor of this shape.
BoxDims strides_of(const engine::Shape& shape);

/// Launches it as work `name`.
void launch_strided_copy(const engine::Stream& stream, std::string_view name, StridedCopy copy);

/// The CUDA side; `copy` has at least one element.
void strided_copy_cuda(const engine::Stream& stream, const StridedCopy& copy);

}  // namespace tessera::ops

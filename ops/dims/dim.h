// One dimension of a shape, and what lies around it. Private to ops.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "engine/tensor.h"

namespace tessera::ops {

/// A shape as (outer, numel, inner), `numel` being that of dimension `index`.
struct Dim {
  int index;
  std::int64_t outer, numel, inner;
};

/// Dimension `dim` of `x`; negative counts from the end. Throws InvalidArgument, in the name of
/// `op`, if there is none.
inline Dim dim_of(const engine::Tensor& x, int dim, std::string_view op) {
  const int rank = x.shape().rank();
  engine::require(dim >= -rank && dim < rank, "[{}] expected a dimension of {}, got {} ({})", op,
                  x.shape(), dim, x.name());
  Dim result{.index = dim < 0 ? dim + rank : dim, .outer = 1, .numel = x.dim(dim), .inner = 1};
  for (int k = 0; k < rank; ++k) {
    if (k < result.index) result.outer *= x.dim(k);
    if (k > result.index) result.inner *= x.dim(k);
  }
  return result;
}

/// `shape` with another dimension `index`.
inline engine::Shape with_dim(const engine::Shape& shape, int index, std::int64_t numel) {
  std::array<std::int64_t, engine::Shape::kMaxRank> dims{};
  std::copy(shape.dims().begin(), shape.dims().end(), dims.begin());
  dims[static_cast<std::size_t>(index)] = numel;
  return engine::Shape(std::span<const std::int64_t>(dims.data(), shape.dims().size()));
}

}  // namespace tessera::ops

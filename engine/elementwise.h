// The vector space that tape, comm and shard need, on raw pointers. T, S are float or BFloat16;
// arithmetic is f32, one rounding per stored element, so results do not depend on how a range is
// split. Ranges must not overlap unless equal.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/dtype.h"
#include "engine/tensor.h"

namespace tessera::engine {

/// dst[i] = src[i], converted.
template <class T, class S>
void cast(T* dst, const S* src, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) store_f32(dst[i], to_f32(src[i]));
}

/// dst[i] += src[i].
template <class T, class S>
void add(T* dst, const S* src, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) store_f32(dst[i], to_f32(dst[i]) + to_f32(src[i]));
}

/// dst[i] = src[i] or dst[i] += src[i]: the one place that knows what `accumulate` means.
template <class T, class S>
void assign_or_add(T* dst, const S* src, std::int64_t numel, bool accumulate) {
  if (accumulate) {
    add(dst, src, numel);
  } else {
    cast(dst, src, numel);
  }
}

/// Tensor forms: f32 or bf16, any mix. Throw InvalidArgument if numel differs.
void cast(const Tensor& dst, const Tensor& src);
void assign_or_add(const Tensor& dst, const Tensor& src, bool accumulate);
void fill_zero(const Tensor& dst);

}  // namespace tessera::engine

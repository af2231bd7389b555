// The vector space that tape, comm and shard need, on raw pointers. T, S are float or BFloat16;
// arithmetic is f32, one rounding per stored element, so results do not depend on how a range is
// split. Ranges must not overlap unless equal.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "engine/dtype.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

/// dst[i] = src[i], converted.
template <class T, class S>
void cast(T* dst, const S* src, std::int64_t numel) {
  if constexpr (std::is_same_v<T, S>) {
    std::memmove(dst, src, static_cast<std::size_t>(numel) * sizeof(T));
  } else {
    for (std::int64_t i = 0; i < numel; ++i) store_f32(dst[i], to_f32(src[i]));
  }
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

/// Tensor forms on the CPU: f32 or bf16, any mix. Throw InvalidArgument if numel differs.
void cast(const Tensor& dst, const Tensor& src);
void assign_or_add(const Tensor& dst, const Tensor& src, bool accumulate);
void fill_zero(const Tensor& dst);

// The functions above as work of a stream, on its device. Addresses are taken now; the tensors ride
// along.
// What they are views of stays resident until an event after this.

void launch_assign_or_add(const Stream& stream, const Tensor& dst, const Tensor& src,
                          bool accumulate, std::string_view name, std::string detail = {});
/// dst[i] = value; f32 or bf16.
void launch_set(const Stream& stream, const Tensor& dst, float value, std::string_view name);
/// The bytes of dst = data, at most 1 KiB in words of 8, taken at the call: for what changes from
/// launch to launch of a graph.
void launch_store(const Stream& stream, const Tensor& dst, std::span<const std::byte> data,
                  std::string_view name);
/// Sets every byte.
void launch_fill(const Stream& stream, const Tensor& dst, int byte, std::string_view name,
                 std::string detail = {});

}  // namespace tessera::engine

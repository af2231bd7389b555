// Copies between tensors of any devices.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace tessera::engine {

/// dst = src as work of `stream`: equal dtype and numel, any two devices; a CUDA stream if one of
/// them is a GPU. Pageable host memory is copied before this returns or, as destination, written
/// before it returns; everything else is asynchronous, and both stay resident until an event after
/// this. Throws InvalidArgument if the tensors do not fit.
void copy(const Tensor& dst, const Tensor& src, const Stream& stream,
          std::string_view name = "copy");

/// Writes `values`, rounded to its dtype (f32 or bf16), to `dst` of as many elements, on any
/// device. Throws InvalidArgument if dtype or number differ.
void copy_from_floats(const Tensor& dst, std::span<const float> values);

/// The elements of `t` on the host. Blocks until what the stream of its memory was told is done.
/// Throws InvalidArgument if T is not its dtype.
template <class T>
std::vector<T> to_vector(const Tensor& t) {
  std::vector<T> values(static_cast<std::size_t>(t.numel()));
  static_cast<void>(t.data<T>());  // checks the dtype
  t.copy_to_host(values.data());
  return values;
}

}  // namespace tessera::engine

#include "ops/dims/strided_copy.h"

#include <cstddef>

#include "ops/pointwise.h"

namespace tessera::ops {

using engine::Shape;
using engine::Stream;

namespace {

std::size_t at(int k) { return static_cast<std::size_t>(k); }

std::int64_t numel_of(const StridedCopy& copy) {
  std::int64_t numel = 1;
  for (int k = 0; k < copy.rank; ++k) numel *= copy.dims[at(k)];
  return numel;
}

// Neighbouring dimensions that lie like one become one, so that the last is as long as can be.
StridedCopy merged(const StridedCopy& copy) {
  StridedCopy result = copy;
  result.rank = 0;
  for (int k = 0; k < copy.rank; ++k) {
    const std::int64_t dim = copy.dims[at(k)];
    if (dim == 1) continue;
    const std::int64_t to = copy.to.strides[at(k)], from = copy.from.strides[at(k)];
    const std::size_t last = at(result.rank - 1);
    if (result.rank > 0 && result.to.strides[last] == to * dim &&
        result.from.strides[last] == from * dim) {
      result.dims[last] *= dim;
    } else {
      result.dims[at(result.rank++)] = dim;
    }
    result.to.strides[at(result.rank - 1)] = to;
    result.from.strides[at(result.rank - 1)] = from;
  }
  if (result.rank == 0) result.dims[at(result.rank++)] = 1;
  return result;
}

// Of the dimensions from k on.
template <class T>
void copy_cpu(const StridedCopy& copy, int k, T* to, const T* from) {
  const std::int64_t dim = copy.dims[at(k)];
  const std::int64_t to_stride = copy.to.strides[at(k)], from_stride = copy.from.strides[at(k)];
  if (k + 1 < copy.rank) {
    for (std::int64_t i = 0; i < dim; ++i)
      copy_cpu(copy, k + 1, to + i * to_stride, from + i * from_stride);
  } else if (to_stride == 1 && from_stride == 1 && copy.divisor == 1) {
    write_elements(to, dim, copy.accumulate,
                   [from](std::int64_t i) { return engine::to_f32(from[i]); });
  } else if (to_stride == 1 && from_stride == 1) {
    write_elements(to, dim, copy.accumulate,
                   [=, d = copy.divisor](std::int64_t i) { return engine::to_f32(from[i]) / d; });
  } else {
    for (std::int64_t i = 0; i < dim; ++i)
      write_elements(to + i * to_stride, 1, copy.accumulate, [&](std::int64_t) {
        return engine::to_f32(from[i * from_stride]) / copy.divisor;
      });
  }
}

}  // namespace

BoxDims strides_of(const Shape& shape) {
  BoxDims strides{};
  std::int64_t stride = 1;
  for (int k = shape.rank() - 1; k >= 0; --k) {
    strides[at(k)] = stride;
    stride *= shape.dim(k);
  }
  return strides;
}

void launch_strided_copy(const Stream& stream, std::string_view name, StridedCopy copy) {
  copy = merged(copy);
  const std::int64_t numel = numel_of(copy), nbytes = numel * size_of(copy.to.tensor.dtype());
  const double flops = (copy.divisor == 1 ? 0 : 1) + (copy.accumulate ? 1 : 0);
  stream.launch(
      {.name = name,
       .flops = static_cast<double>(numel) * flops,
       .bytes_read = copy.accumulate ? 2 * nbytes : nbytes,
       .bytes_written = nbytes},
      [copy, numel] {
        if (numel == 0) return;
        engine::dispatch_float(copy.to.tensor.dtype(), "strided_copy", [&](auto t) {
          using T = decltype(t);
          copy_cpu(copy, 0, copy.to.tensor.data<T>() + copy.to.begin,
                   static_cast<const T*>(copy.from.tensor.data<T>()) + copy.from.begin);
        });
      },
      [&](const auto& s) {
        if (numel > 0) strided_copy_cuda(s, copy);
      });
}

}  // namespace tessera::ops

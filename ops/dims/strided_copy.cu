#include "engine/cuda_launch.cuh"
#include "ops/dims/strided_copy.h"

namespace tessera::ops {

using engine::store_f32;
using engine::Stream;
using engine::to_f32;

namespace {

struct BoxStrides {
  int rank = 0;
  std::int64_t dims[kMaxBoxRank] = {}, to[kMaxBoxRank] = {}, from[kMaxBoxRank] = {};
};

template <class T>
__global__ void strided_copy_kernel(T* to, const T* from, BoxStrides box, std::int64_t numel,
                                    float divisor, bool accumulate) {
  for (std::int64_t i = engine::stride_begin(); i < numel; i += engine::stride_step()) {
    std::int64_t rest = i, to_offset = 0, from_offset = 0;
#pragma unroll
    for (int k = kMaxBoxRank - 1; k >= 0; --k) {
      if (k >= box.rank) continue;
      const std::int64_t index = rest % box.dims[k];
      rest /= box.dims[k];
      to_offset += index * box.to[k];
      from_offset += index * box.from[k];
    }
    const float whole = to_f32(from[from_offset]), value = divisor == 1 ? whole : whole / divisor;
    T& element = to[to_offset];
    store_f32(element, accumulate ? to_f32(element) + value : value);
  }
}

}  // namespace

void strided_copy_cuda(const Stream& stream, const StridedCopy& copy) {
  BoxStrides box;
  box.rank = copy.rank;
  std::int64_t numel = 1;
  for (int k = 0; k < copy.rank; ++k) {
    const auto at = static_cast<std::size_t>(k);
    box.dims[k] = copy.dims[at];
    box.to[k] = copy.to.strides[at];
    box.from[k] = copy.from.strides[at];
    numel *= copy.dims[at];
  }
  engine::dispatch_float(copy.to.tensor.dtype(), "strided_copy", [&](auto t) {
    using T = decltype(t);
    engine::launch_kernel(stream, engine::stride_shape(numel), strided_copy_kernel<T>,
                          copy.to.tensor.data<T>() + copy.to.begin,
                          static_cast<const T*>(copy.from.tensor.data<T>()) + copy.from.begin, box,
                          numel, copy.divisor, copy.accumulate);
  });
}

}  // namespace tessera::ops

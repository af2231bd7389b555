#include "engine/cuda_launch.cuh"
#include "engine/init.h"

namespace tessera::engine::cuda {
namespace {

// A thread makes the four values of a block of random numbers, of which the ends may lack some.
template <class T>
__global__ void init_kernel(Init init, RandomStream random, T* dst, std::int64_t begin,
                            std::int64_t numel) {
  const std::int64_t first = begin / 4, end = (begin + numel + 3) / 4;
  for (std::int64_t block = first + stride_begin(); block < end; block += stride_step()) {
    const auto values = init.values(random, static_cast<std::uint64_t>(block));
    for (int k = 0; k < 4; ++k) {
      const std::int64_t i = 4 * block + k - begin;
      if (i >= 0 && i < numel) store_f32(dst[i], values[static_cast<std::size_t>(k)]);
    }
  }
}

}  // namespace

void init(const Stream& stream, const Init& init, const RandomStream& random, std::byte* dst,
          DType dtype, std::int64_t begin, std::int64_t numel) {
  if (numel == 0) return;
  dispatch_float(dtype, "init", [&](auto t) {
    using T = decltype(t);
    launch_kernel(stream, stride_shape((numel + 3) / 4 + 1), init_kernel<T>, init, random,
                  reinterpret_cast<T*>(dst), begin, numel);
  });
}

}  // namespace tessera::engine::cuda

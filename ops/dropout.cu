#include "engine/cuda_launch.cuh"
#include "ops/dropout_cuda.h"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::GradTarget;
using engine::Stream;
using engine::Tensor;

namespace {

constexpr int kWords = 4;  // of a Philox block

__device__ float keep_or_drop(float x, std::uint32_t word, const DropoutMask& mask) {
  return (word >> 8) >= mask.threshold ? x * mask.scale : 0.0f;
}

// A thread makes whole blocks of random words, so its elements begin where a block does.
// kAligned: element 0 begins a block, and out and in are aligned as well.
template <bool kAligned, class T>
__global__ void dropout_kernel(T* out, bool accumulate, const T* in, std::int64_t numel,
                               DropoutMask mask) {
  if (mask.offset_count != nullptr) {
    mask.first_index += static_cast<std::uint64_t>(*mask.offset_count * mask.offset_numel);
  }
  constexpr int kWidth = kAligned ? kVectorWidth<T> : kWords;
  const auto skip = static_cast<std::int64_t>(mask.first_index % kWords);  // of the first block
  const std::uint64_t first_block = mask.first_index / kWords;
  for (std::int64_t i = engine::stride_begin() * kWidth - skip; i < numel;
       i += engine::stride_step() * kWidth) {
    std::uint32_t words[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; k += kWords) {
      const auto block = engine::philox(
          mask.random.seed, first_block + static_cast<std::uint64_t>((i + skip + k) / kWords),
          mask.random.stream);
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[k + w] = block[static_cast<std::size_t>(w)];
    }
    if (kAligned && i + kWidth <= numel) {
      float values[kWidth];
      read_vector<kWidth, true>(values, in + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = keep_or_drop(values[k], words[k], mask);
      write_vector<kWidth, true>(out + i, values, accumulate);
      continue;
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (i + k < 0 || i + k >= numel) continue;
      const float value[] = {keep_or_drop(engine::to_f32(in[i + k]), words[k], mask)};
      write_vector<1, false>(out + i + k, value, accumulate);
    }
  }
}

}  // namespace

void dropout_cuda(const Stream& stream, const GradTarget& out, const Tensor& in,
                  const DropoutMask& mask) {
  engine::dispatch_float(in.dtype(), "dropout", [&](auto t) {
    using T = decltype(t);
    T* dst = out.dst.data<T>();
    const T* src = in.data<T>();
    const bool aligned = mask.first_index % kWords == 0 &&
                         (mask.offset_count == nullptr || mask.offset_numel % kWords == 0) &&
                         are_aligned<kVectorWidth<T>>(dst, src);
    const std::int64_t width = aligned ? kVectorWidth<T> : kWords;
    const std::int64_t count = (in.numel() + kWords - 1 + width - 1) / width;
    engine::launch_kernel(stream, engine::stride_shape(in.numel() == 0 ? 0 : count),
                          aligned ? dropout_kernel<true, T> : dropout_kernel<false, T>, dst,
                          out.accumulate, src, in.numel(), mask);
  });
}

}  // namespace tessera::ops

#include <cmath>

#include "engine/cuda_launch.cuh"
#include "engine/dtype.h"
#include "shard/hooks/half.h"
#include "shard/hooks/hook_kernels_cuda.h"

namespace tessera::shard {

using engine::launch_kernel;
using engine::store_f32;
using engine::Stream;
using engine::stride_begin;
using engine::stride_shape;
using engine::stride_step;
using engine::Tensor;
using engine::to_f32;

namespace {

using Word = unsigned long long;

constexpr int kNumThreads = 256;
constexpr double kLostBelow = 1e-6;  // as on the CPU

const Word* flag_of(const Tensor& bad) {
  return bad.defined() ? reinterpret_cast<const Word*>(bad.raw()) : nullptr;
}

__device__ bool is_bad(const Word* bad) { return bad != nullptr && *bad != 0; }

__device__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000) != 0x7F800000; }

template <class G, class E>
__global__ void add_error_kernel(float* input, const G* gradient, const E* error,
                                 std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    const float g = to_f32(gradient[i]);
    input[i] = error == nullptr ? g : g + to_f32(error[i]);
  }
}

// engine::RandomStream::normal(), for kernels.
__device__ float normal(const engine::RandomStream& random, std::uint64_t index) {
  const auto block = engine::philox(random.seed, index / 4, random.stream);
  const std::size_t pair = (index % 4) / 2 * 2;
  const double u1 = engine::RandomStream::to_uniform(block[pair]);
  const double u2 = engine::RandomStream::to_uniform(block[pair + 1]);
  const double radius = sqrt(-2.0 * log(u1)), angle = 6.283185307179586 * u2;
  return static_cast<float>(radius * (index % 2 == 0 ? cos(angle) : sin(angle)));
}

__global__ void draw_kernel(float* out, engine::RandomStream random, std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    out[i] = normal(random, static_cast<std::uint64_t>(i));
  }
}

// Of all threads of the block, in one order whatever the GPU.
__device__ double block_sum(double value, double* shared) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // the last sum has been read
  shared[thread] = value;
  for (int half = kNumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] += shared[thread + half];
  }
  __syncthreads();
  return shared[0];
}

// One block makes one matrix orthonormal; each thread has its rows.
__global__ void orthonormalize_kernel(float* data, std::int64_t rows, std::int64_t rank, double eps,
                                      LostColumns lost, const Word* bad) {
  __shared__ double shared[kNumThreads];
  if (is_bad(bad)) return;
  const int passes = eps > 0 ? 1 : 2;
  const auto first = static_cast<std::int64_t>(threadIdx.x);
  const auto dot = [&](std::int64_t a, std::int64_t b) {
    double sum = 0;
    for (std::int64_t i = first; i < rows; i += kNumThreads) {
      sum += static_cast<double>(data[i * rank + a]) * static_cast<double>(data[i * rank + b]);
    }
    return block_sum(sum, shared);
  };
  for (std::int64_t c = 0; c < rank; ++c) {
    double norm = 0, before = 0;
    for (int attempt = 0; attempt < 2; ++attempt) {
      before = sqrt(dot(c, c));
      for (int pass = 0; pass < passes; ++pass) {
        for (std::int64_t k = 0; k < c; ++k) {
          const double along = dot(k, c);
          for (std::int64_t i = first; i < rows; i += kNumThreads) {
            float& x = data[i * rank + c];
            x = static_cast<float>(x - along * static_cast<double>(data[i * rank + k]));
          }
        }
      }
      norm = sqrt(dot(c, c));
      if (norm > kLostBelow * before || !lost.replaced || attempt > 0) break;
      for (std::int64_t i = first; i < rows; i += kNumThreads) {
        data[i * rank + c] =
            normal(lost.random, static_cast<std::uint64_t>(rows * rank + i * rank + c));
      }
    }
    const double factor = norm <= kLostBelow * before ? 0.0 : 1.0 / (norm + eps);
    for (std::int64_t i = first; i < rows; i += kNumThreads) {
      float& x = data[i * rank + c];
      x = static_cast<float>(x * factor);
    }
  }
}

__global__ void look_kernel(Word* bad, const float* values, std::int64_t numel) {
  bool finite = true;
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    finite = finite && is_finite(values[i]);
  }
  if (!finite) atomicMax(bad, Word{1});
}

__global__ void mean_kernel(float* sums, float count, float* kept, const Word* bad,
                            std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    sums[i] /= count;
    if (kept != nullptr && !is_bad(bad)) kept[i] = sums[i];
  }
}

__global__ void add_decompressed_kernel(float* sum, const float* mean, float factor,
                                        bool accumulate, const Word* bad, std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    sum[i] =
        is_bad(bad) ? __uint_as_float(0x7FC00000) : (accumulate ? sum[i] : 0.0f) + factor * mean[i];
  }
}

template <class E>
__global__ void keep_error_kernel(E* error, const E* before, const float* input,
                                  const float* decompressed, const Word* bad, std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    E rounded;
    store_f32(rounded, input[i] - decompressed[i]);
    error[i] = is_bad(bad) || !is_finite(to_f32(rounded)) ? before[i] : rounded;
  }
}

template <class T>
__global__ void pack_half_kernel(Float16* words, const T* in, HalfBlocks blocks,
                                 std::int64_t in_numel, std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    const Range block = blocks.of(i / blocks.block_numel, in_numel);
    const std::int64_t at = i % blocks.block_numel;
    words[i] = at < block.numel ? Float16::from_float(to_f32(in[block.begin + at])) : Float16{};
  }
}

__global__ void add_halves_kernel(float* out, const Float16* words, std::int64_t num_ranks,
                                  std::int64_t block_numel, bool accumulate, std::int64_t numel) {
  for (std::int64_t i = stride_begin(); i < numel; i += stride_step()) {
    float sum = accumulate ? out[i] + words[i].to_float() : words[i].to_float();
    for (std::int64_t r = 1; r < num_ranks; ++r) sum += words[r * block_numel + i].to_float();
    out[i] = sum;
  }
}

}  // namespace

void add_error_cuda(const Stream& stream, const Tensor& input, const Tensor& gradient,
                    const Tensor& error) {
  const engine::DType dtype = error.defined() ? error.dtype() : engine::DType::kF32;
  engine::dispatch_float(gradient.dtype(), "add_error", [&](auto g) {
    engine::dispatch_float(dtype, "add_error", [&](auto e) {
      using G = decltype(g);
      using E = decltype(e);
      launch_kernel(stream, stride_shape(input.numel()), add_error_kernel<G, E>,
                    input.data<float>(), gradient.data<G>(),
                    error.defined() ? error.data<E>() : nullptr, input.numel());
    });
  });
}

void draw_cuda(const Stream& stream, const Tensor& out, const engine::RandomStream& random) {
  launch_kernel(stream, stride_shape(out.numel()), draw_kernel, out.data<float>(), random,
                out.numel());
}

void orthonormalize_cuda(const Stream& stream, const Tensor& matrix, double eps,
                         const LostColumns& lost, const Tensor& bad) {
  launch_kernel(stream, {.grid = dim3(1), .block = dim3(kNumThreads)}, orthonormalize_kernel,
                matrix.data<float>(), matrix.dim(0), matrix.dim(1), eps, lost, flag_of(bad));
}

void look_cuda(const Stream& stream, const Tensor& bad, const Tensor& values) {
  launch_kernel(stream, stride_shape(values.numel()), look_kernel,
                reinterpret_cast<Word*>(bad.raw()), values.data<float>(), values.numel());
}

void mean_cuda(const Stream& stream, const Tensor& sums, std::int64_t count, const Tensor& kept,
               const Tensor& bad) {
  launch_kernel(stream, stride_shape(sums.numel()), mean_kernel, sums.data<float>(),
                static_cast<float>(count), kept.defined() ? kept.data<float>() : nullptr,
                flag_of(bad), sums.numel());
}

void add_decompressed_cuda(const Stream& stream, const Tensor& sum, const Tensor& mean,
                           std::int64_t count, bool accumulate, const Tensor& bad) {
  launch_kernel(stream, stride_shape(sum.numel()), add_decompressed_kernel, sum.data<float>(),
                mean.data<float>(), static_cast<float>(count), accumulate, flag_of(bad),
                sum.numel());
}

void keep_error_cuda(const Stream& stream, const Tensor& error, const Tensor& before,
                     const Tensor& input, const Tensor& decompressed, const Tensor& bad) {
  engine::dispatch_float(error.dtype(), "keep_error", [&](auto e) {
    using E = decltype(e);
    launch_kernel(stream, stride_shape(error.numel()), keep_error_kernel<E>, error.data<E>(),
                  before.data<E>(), input.data<float>(), decompressed.data<float>(), flag_of(bad),
                  error.numel());
  });
}

void pack_half_cuda(const Stream& stream, const Tensor& words, const Tensor& in,
                    const HalfBlocks& blocks) {
  const std::int64_t numel = blocks.num_ranks * blocks.block_numel;
  engine::dispatch_float(in.dtype(), "pack_half", [&](auto t) {
    using T = decltype(t);
    launch_kernel(stream, stride_shape(numel), pack_half_kernel<T>,
                  reinterpret_cast<Float16*>(words.raw()), in.data<T>(), blocks, in.numel(), numel);
  });
}

void add_halves_cuda(const Stream& stream, const Tensor& out, const Tensor& words,
                     std::int64_t num_ranks, std::int64_t block_numel, bool accumulate) {
  launch_kernel(stream, stride_shape(out.numel()), add_halves_kernel, out.data<float>(),
                reinterpret_cast<const Float16*>(words.raw()), num_ranks, block_numel, accumulate,
                out.numel());
}

}  // namespace tessera::shard

#include <algorithm>
#include <cmath>

#include "engine/cuda_launch.cuh"
#include "ops/rope_cuda.h"
#include "ops/vector_access.cuh"

namespace tessera::ops {

using engine::GradTarget;
using engine::Stream;
using engine::Tensor;

namespace {

__global__ void table_kernel(float* table, const std::int32_t* positions, std::int64_t tokens,
                             std::int64_t half, double base, RopeScaling scaling) {
  for (std::int64_t i = engine::stride_begin(); i < tokens * half; i += engine::stride_step()) {
    const std::int64_t t = i / half, k = i % half;
    const double position = static_cast<double>(positions != nullptr ? positions[t] : t);
    const double step = pow(base, -static_cast<double>(k) / static_cast<double>(half));
    const double angle = position * scaling.scaled(step);
    float* row = table + t * 2 * half;
    row[k] = static_cast<float>(cos(angle));
    row[half + k] = static_cast<float>(sin(angle));
  }
}

struct RotationShape {
  std::int64_t tokens;
  int heads, rotated, half;  // of the head size
};

// One block a token. A thread takes kWidth neighbours of the first half of a head and their
// partners in the second half.
template <int kWidth, bool kAligned, class T>
__global__ void rotate_kernel(T* y, bool accumulate, const T* x, const float* table,
                              RotationShape s, float direction) {
  const std::int64_t row = blockIdx.x;
  const float* cosines = table + row % s.tokens * (2 * s.half);
  const float* sines = cosines + s.half;
  const int units = s.half / kWidth;  // of a head
  for (int unit = static_cast<int>(threadIdx.x); unit < s.heads * units;
       unit += static_cast<int>(blockDim.x)) {
    const int head = unit / units, i = (unit - head * units) * kWidth;
    const std::int64_t begin = (row * s.heads + head) * (2 * s.half) + i;
    float a[kWidth], b[kWidth];
    read_vector<kWidth, kAligned>(a, x + begin);
    read_vector<kWidth, kAligned>(b, x + begin + s.half);
    if (head < s.rotated) {
      float cosine[kWidth], sine[kWidth];
      read_vector<kWidth, kAligned>(cosine, cosines + i);
      read_vector<kWidth, kAligned>(sine, sines + i);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float p = a[k], q = b[k], turn = direction * sine[k];
        a[k] = p * cosine[k] - q * turn;
        b[k] = q * cosine[k] + p * turn;
      }
    }
    write_vector<kWidth, kAligned>(y + begin, a, accumulate);
    write_vector<kWidth, kAligned>(y + begin + s.half, b, accumulate);
  }
}

}  // namespace

void rope_table_cuda(const Stream& stream, const Tensor& table, const Tensor& positions,
                     double base, const RopeScaling& scaling) {
  const std::int64_t half = table.dim(1) / 2;
  engine::launch_kernel(stream, engine::stride_shape(table.dim(0) * half), table_kernel,
                        table.data<float>(),
                        positions.defined() ? positions.data<std::int32_t>() : nullptr,
                        table.dim(0), half, base, scaling);
}

void rope_rotate_cuda(const Stream& stream, const GradTarget& y, const Tensor& x,
                      const Tensor& table, const RopeShape& shape, float direction) {
  const auto half = static_cast<int>(shape.head_size / 2);
  const RotationShape s{shape.tokens, static_cast<int>(shape.heads),
                        static_cast<int>(shape.rotated), half};
  engine::dispatch_float(x.dtype(), "rope", [&](auto t) {
    using T = decltype(t);
    constexpr int kWidth = kVectorWidth<T>;
    const bool wide = half % kWidth == 0 && are_aligned<kWidth>(y.dst.data<T>(), x.data<T>());
    const int units = s.heads * (wide ? half / kWidth : half);
    const int threads = std::clamp((units + 31) / 32 * 32, 32, 256);
    engine::launch_kernel(stream,
                          {.grid = dim3(static_cast<unsigned>(shape.batch * shape.tokens)),
                           .block = dim3(static_cast<unsigned>(threads))},
                          wide ? rotate_kernel<kWidth, true, T> : rotate_kernel<1, false, T>,
                          y.dst.data<T>(), y.accumulate, x.data<T>(), table.data<float>(), s,
                          direction);
  });
}

}  // namespace tessera::ops

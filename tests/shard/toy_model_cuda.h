// The kernels of toy_model.h on a GPU: the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/dtype.h"
#include "engine/stream.h"

namespace tessera::testing {

/// Where elements are, f32 or bf16; null: nobody wants them.
struct ToyElements {
  std::byte* data = nullptr;
  engine::DType dtype = engine::DType::kF32;
  bool accumulate = false;
};

void toy_affine_cuda(const engine::Stream& stream, float* y, const float* x, ToyElements w,
                     ToyElements b, std::int64_t numel);
void toy_affine_backward_cuda(const engine::Stream& stream, ToyElements dw, ToyElements db,
                              ToyElements dx, const float* dy, const float* x, ToyElements w,
                              std::int64_t numel);
void toy_sum_cuda(const engine::Stream& stream, float* y, const float* x, std::int64_t numel);
void toy_sum_backward_cuda(const engine::Stream& stream, ToyElements dx, const float* dy,
                           std::int64_t numel);

}  // namespace tessera::testing

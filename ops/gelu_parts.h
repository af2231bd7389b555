// What gelu() is made of, for an op that does it along with something else. Private to ops.
#pragma once

#include <cstdint>

#include "engine/gemm/gemm_cuda.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "ops/vector_math.h"

namespace tessera::ops {

inline constexpr double kTanhGeluFlops = kSigmoidFlops + 6;        ///< of an element
inline constexpr double kTanhGeluSlopeFlops = kSigmoidFlops + 14;  ///< of it and a product

/// y[i] = gelu(x[i]), tanh, for `numel` elements f32 or bf16.
void tanh_gelu_cuda(const engine::Stream& stream, engine::DType dtype, void* y, const void* x,
                    std::int64_t numel);

/// GeluSlope::finish (engine/gemm/gemm_cuda.h), in place: has the bits of gelu()'s backward. Sums
/// as in ops/column_sums.h, for as many parts as that makes of C.
void finish_tanh_gelu_slope_cuda(const engine::Stream& stream, const engine::DeviceMatrix& c,
                                 const engine::GeluSlope& slope, bool is_sloped);

/// What gelu() does but compute: for a y that holds, or is to hold, gelu(h), tanh.
void record_tanh_gelu(engine::Tape& tape, const engine::Tensor& h, const engine::Tensor& y);

}  // namespace tessera::ops

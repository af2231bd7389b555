// Table lookup on CUDA streams; defined where CUDA is built. Private to ops. Same bits as the CPU.
#pragma once

#include <cstdint>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tape.h"
#include "engine/tensor.h"

namespace tessera::ops {

/// y[i] = table[tokens[i]], plus positions[i % T] if `positions` is defined, with T the last
/// dimension of tokens. A token outside the table gives a row of NaN.
void embedding_forward_cuda(const engine::Stream& stream, const engine::Tensor& y,
                            const engine::Tensor& tokens, const engine::Tensor& table,
                            const engine::Tensor& positions);

/// Adds the rows of dy into the rows of their tokens, in order, in f32 with one rounding; rows
/// without a token become zero unless grad.accumulate. Tokens outside the table are left out. Takes
/// a workspace of 2 i32 a token and a row from `memory`, whose home is `stream`. Throws
/// InvalidArgument for 2^31 tokens or rows.
void embedding_backward_cuda(const engine::Stream& stream, const engine::Memory& memory,
                             const engine::GradTarget& grad, const engine::Tensor& dy,
                             const engine::Tensor& tokens);

/// embedding_backward_cuda() of positions: row i of dy goes to row i % num_tokens.
void position_embedding_backward_cuda(const engine::Stream& stream, const engine::GradTarget& grad,
                                      const engine::Tensor& dy, std::int64_t num_tokens);

}  // namespace tessera::ops

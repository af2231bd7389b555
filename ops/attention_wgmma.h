// Attention in bf16 by the products of warpgroups, which GPUs of compute capability 9.x alone have.
// Private to attention; defined in attention_sm90a.cu.
#pragma once

#include <cstdint>

#include "engine/dtype.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "ops/attention_cuda.h"

namespace tessera::ops::flash {
struct BackwardTensors;
}

namespace tessera::ops::flash_wgmma {

/// Does it take heads of this size? Heads are padded to 64 or 128, those between by too much.
constexpr bool takes(std::int64_t head_size) {
  return (head_size > 32 && head_size <= 64) || (head_size > 96 && head_size <= 128);
}

/// As attention_forward_cuda, for heads that it takes.
void forward(const engine::Stream& stream, const AttentionLayout& layout,
             const engine::Tensor& documents, const engine::BFloat16* qkv, engine::BFloat16* y,
             float* lse);

/// Rows of a sample whose columns backward sums together, of dqkv: a warpgroup's.
inline constexpr std::int64_t kPartRows = 64;
constexpr std::int64_t parts_of_sample(const AttentionLayout& s) {
  return (s.tokens + kPartRows - 1) / kPartRows;
}

/// What backward needs besides its tensors.
struct BackwardWorkspace {
  std::int64_t num_turns;  ///< counters, cleared, and one more for tickets
  std::int64_t dq_numel;   ///< f32
};
BackwardWorkspace backward_workspace(const AttentionLayout& layout);

/// As attention_backward_cuda, for heads that it takes.
void backward(const engine::Stream& stream, const AttentionLayout& layout,
              const engine::Tensor& documents, const flash::BackwardTensors& tensors);

}  // namespace tessera::ops::flash_wgmma

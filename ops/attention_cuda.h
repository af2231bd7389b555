// The CUDA half of attention. Private to attention.
#pragma once

#include <cstdint>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "ops/attention.h"
#include "ops/attention_layout.h"

namespace tessera::ops {

/// Largest head size of the CUDA kernels, whose tiles fill registers and shared memory.
inline constexpr std::int64_t kMaxCudaHeadSize = 128;
/// Largest batch and number of heads: dimensions of a grid.
inline constexpr std::int64_t kMaxCudaGrid = 65535;

/// Calls `fn` with the layout that kernels are compiled for. `documents`: undefined, or of
/// attention_documents_cuda().
template <class F>
void dispatch_layout(const AttentionLayout& s, const engine::Tensor& documents, F fn) {
  if (!documents.defined()) return fn(s);
  const auto* const begins = documents.data<std::int32_t>();
  fn(DocumentLayout{s, begins, begins + s.batch * s.tokens});
}

/// Assigns documents (2, B, T) i32: DocumentLayout's begins, then its ends, of `positions` (B, T)
/// as AttentionShape has them. Throws DeviceError.
void attention_documents_cuda(const engine::Stream& stream, const engine::Tensor& documents,
                              const engine::Tensor& positions);

/// Throws InvalidArgument unless the GPU has the instructions of CudaAttention::kWgmma.
void require_wgmma_cuda(const engine::Stream& stream);

/// y and lse of qkv, as attention() defines them; documents and lse may be undefined. Head size at
/// most kMaxCudaHeadSize. bf16: products of bf16 values on tensor cores, probabilities rounded to
/// bf16. Throws DeviceError, and InvalidArgument for kernels that the GPU cannot run.
void attention_forward_cuda(const engine::Stream& stream, CudaAttention kernels,
                            const AttentionLayout& layout, const engine::Tensor& documents,
                            const engine::Tensor& qkv, const engine::Tensor& y,
                            const engine::Tensor& lse);

/// For the sums of the columns of dqkv as backward stores it, in parts (parts, (H + 2 KV) * D) f32:
/// uninitialised workspace. Undefined where the kernels of backward leave none.
engine::Tensor empty_attention_sums(const engine::Stream& stream, const engine::Memory& memory,
                                    CudaAttention kernels, const AttentionLayout& layout,
                                    engine::DType dtype);

/// Assigns every element of dqkv, or adds to it, and assigns `column_sums`, if it is defined: made
/// by empty_attention_sums() for the same kernels; `documents` may be undefined, as in forward.
/// Workspace of `memory`: (B, H, T) f32, and for bf16 f32 for each element of q, T and the head
/// size rounded up to tiles. Throws DeviceError.
void attention_backward_cuda(const engine::Stream& stream, const engine::Memory& memory,
                             CudaAttention kernels, const AttentionLayout& layout,
                             const engine::Tensor& documents, const engine::Tensor& qkv,
                             const engine::Tensor& y, const engine::Tensor& lse,
                             const engine::Tensor& dy, const engine::Tensor& dqkv, bool accumulate,
                             const engine::Tensor& column_sums);

}  // namespace tessera::ops

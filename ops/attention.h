// Multi-head attention with grouped queries in tiles: no T x T matrix is ever stored.
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023);
// grouped queries: Ainslie et al., "GQA" (2023).
#pragma once

#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

/// Which kernels a GPU computes attention in bf16 with.
enum class CudaAttention {
  kAuto,   ///< kWgmma on a GPU that has it, else kMma
  kMma,    ///< mma.sync, on any GPU
  kWgmma,  ///< products of warpgroups, on a GPU of compute capability 9.x, for heads of 33 to 64
           ///< and 97 to 128; mma.sync for others
};

/// Throws InvalidArgument unless attention on `stream` can use these kernels: only kWgmma asks for
/// a GPU, and one that is not there (engine/meta.h) has all.
void require_attention_kernels(const engine::Stream& stream, CudaAttention kernels);

struct AttentionShape {
  std::int64_t num_heads = 1;     ///< H
  std::int64_t num_kv_heads = 0;  ///< KV, divides H: heads [g * H/KV, (g + 1) * H/KV) share kv head
                                  ///< g; 0: H
  float scale = 0;                ///< of the scores, not negative; 0: 1 / sqrt(D)
  bool causal = true;             ///< token t sees tokens 0..t only
  /// Where tokens stand in the documents that share a row (B, T), i32, data. The first token of a
  /// row begins a document, and so does each at 0; any other goes on with the one before. A token
  /// sees those of its own document, up to itself. Asks for `causal`. Undefined: a row is one
  /// document.
  engine::Tensor positions = {};
  CudaAttention cuda = CudaAttention::kAuto;  ///< has no say on the CPU
};

/// y[b, t, h] = sum_s softmax_s(scale * q[b, t, h] . k[b, s, g]) v[b, s, g], for each head.
///   qkv (B, T, (H + 2 KV) * D), f32 or bf16: a token's q heads, then its k heads, then its v heads
///   (GPT-2's c_attn) -> y (B, T, H * D) like qkv. Arithmetic is f32; bf16 enters the
///   matrix products as it is on CUDA and on a CPU that multiplies bf16, and probabilities and the
///   gradients of scores are rounded to it for them, each by at most 2^-8 of itself.
///   Saves qkv, y and the log-sum-exp of the scores (B, H, T) f32; backward recomputes the
///   probabilities tile by tile. Workspace grows as T * D; on CUDA backward in bf16 takes as much
///   in f32 as q has elements, D rounded up to 32, 64, 96 or 128, if T is more than a block's keys.
///   On CUDA D is at most 128.
///   Tiles between documents are not computed, though FLOPs are counted as of rows that are one. On
///   the CPU a document has the bits of a row of its own, but that products of bf16 read f32 where
///   a library multiplies matrices of bf16; positions are saved. On CUDA (2, B, T) i32 is saved,
///   where documents begin and end, and infinity or NaN may reach another document in its tile.
///   Throws InvalidArgument if qkv or positions are not of that form, for positions without the
///   causal mask, or if KV does not divide H, D is too large, or the GPU is not one for the kernels
///   that are asked for.
engine::Tensor attention(engine::Tape& tape, const engine::Tensor& qkv,
                         const AttentionShape& shape);

}  // namespace tessera::ops

// Attention whose queries, keys and values are tensors of their own, with any mask.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

struct DotProductOptions {
  float scale = 0;           ///< of the scores, not negative; 0: 1 / sqrt(D)
  engine::Tensor mask = {};  ///< added to the scores: data, 0 where a query sees a key and
                             ///< -infinity where it does not; undefined: all see all
};

/// y[b, t, h] = sum_s softmax_s(scale * q[b, t, h] . k[b, s, g] + mask) v[b, s, g], for each head h
/// of H, which shares head g = h KV / H of the keys with others (Ainslie et al., "GQA", 2023).
///   q (B, T, H, D), k (B, S, KV, D), v (B, S, KV, E), of one dtype, f32 or bf16; KV divides H; a
///   mask of that dtype, (T, S) or (B, KV, H / KV, T, S), with 1 where it is the same for all, such
///   as (B, 1, 1, 1, S) for keys that are padding -> y (B, T, H, E). A query that sees no key gives
///   NaN. Made of scale(), bmm(), add(), softmax() and permute(), which round to the dtype: saves
///   the scaled q, k and v, permuted, and the probabilities, T S numbers for each of B H; with a
///   mask three times as many live at one time. attention() stores none of them and takes a
///   fraction of the time where q, k and v lie packed and the mask is causal or none. Throws
///   InvalidArgument if shapes or dtypes do not fit.
engine::Tensor dot_product_attention(engine::Tape& tape, const engine::Tensor& q,
                                     const engine::Tensor& k, const engine::Tensor& v,
                                     const DotProductOptions& options = {});

/// A mask (T, S), data, for queries that are the last T of S tokens: query t sees keys 0 to S - T +
/// t, and of those the last `window` alone; 0: all of them. f32 or bf16. Throws InvalidArgument if
/// T exceeds S, for a negative window, or another dtype.
/// Filled on the host: make it once, and not in each step.
engine::Tensor causal_mask(engine::Tape& tape, std::int64_t T, std::int64_t S, engine::DType dtype,
                           std::int64_t window = 0);

}  // namespace tessera::ops

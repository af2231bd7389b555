// What attention does between its products of pairs, with a tile of scores: the online softmax and
// its backward, each in one pass that ends with rounded pairs. Private to attention.
#pragma once

#include "engine/gemm/pairs.h"
#include "ops/attention_scores.h"

namespace tessera::ops {

/// As update_softmax(), with probabilities as pairs of columns, (rows, ld / 2); ld is a multiple of
/// kLanes. Only where engine::multiplies_pairs().
void update_pair_softmax(const ScoreTile& tile, const AttentionLayout& s, float* scores,
                         engine::Pair* p, float* largest, float* sum, float* out,
                         std::int64_t out_ld);

/// Pairs of probabilities' rows, (rows / 2, ld), and of the gradients of scores, by rows and by
/// columns, (rows, ld / 2).
struct PairScores {
  engine::Pair *p_rows, *ds_rows, *ds_cols;
};
/// As scores_backward(), of scores and of dy v^T. The last row of an odd number is beside zeros.
void pair_scores_backward(const ScoreTile& tile, const AttentionLayout& s, float* scores,
                          const float* dp, const PairScores& to, const float* lse,
                          const float* deltas);

}  // namespace tessera::ops

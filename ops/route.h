// Which experts compute for a token: the router of a mixture of experts.
#pragma once

#include <cstdint>

#include "engine/tape.h"

namespace tessera::ops {

struct RouteOptions {
  std::int64_t k = 1;         ///< experts a token
  std::int64_t capacity = 0;  ///< tokens an expert takes, at least 1; the rest pass it by
  bool renormalise = false;   ///< gates of a token add up to 1
};

/// Of N tokens and E experts.
struct Routing {
  engine::Tensor gates;    ///< (N, k) f32: how much of each expert's output a token takes
  engine::Tensor experts;  ///< (N, k) i32: the largest gate first
  engine::Tensor slots;    ///< (N, k) i32: expert * capacity + place there; -1: no room
  engine::Tensor aux;      ///< () f32: the load-balancing loss; 1 if the load is even
};

/// Probabilities p = softmax(logits) of each token; gates are the k largest of them (of equal ones
/// the expert of the lower number first), or with `renormalise` those divided by their sum (Jiang
/// et al., "Mixtral of Experts", arXiv:2401.04088). Places are given out to first choices before
/// second ones, and in the order of tokens.
///   aux = E sum_e f_e P_e, where f_e is the share of the N k choices that fell on e, room or not,
///   and P_e the mean of p_e: equations 4 to 6 of Fedus et al., "Switch Transformers",
///   arXiv:2101.03961. Its gradient flows through P alone.
///   logits (N, E) f32 or bf16. Saves p (N, E) f32, gates, experts and counts (E) i32. Sums have
///   one order on the CPU and on a GPU, whose exp is an approximation (ops/vector_math.h). Throws
///   InvalidArgument if shapes or options do not fit.
Routing route(engine::Tape& tape, const engine::Tensor& logits, const RouteOptions& options);

}  // namespace tessera::ops

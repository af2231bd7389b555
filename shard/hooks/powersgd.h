// PowerSGD: gradients are reduced as products of thin matrices (Vogels, Karimireddy, Jaggi,
// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
// Algorithms 1 and 2).
//
// Of each parameter that is worth it the gradient is a matrix G (first dimension, all others). With
// N contributions (of ranks, or of replicas), and the error E that this one remembers:
//
//   M = G + E                             f32, rounded once
//   P = sum over ranks of M Q             Q orthonormal: of the last step, or drawn again
//   P becomes orthonormal
//   Q = sum over ranks of M^T P, / N
//   D = P Q^T                             the mean gradient, approximately: the reducer's sum += N
//   D E = M - D                             f32, rounded once
//
// All other parameters are summed as they are, in one message with the P. All ranks compute P and Q
// from the same sums, so D has the same bits everywhere, whatever is sharded.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/dtype.h"
#include "shard/hooks/hook.h"
#include "shard/hooks/low_rank_layout.h"
#include "shard/hooks/wire.h"

namespace tessera::shard {

struct PowerSgdOptions {
  LowRankOptions low_rank = {};
  std::int64_t start_step = 10;  ///< steps before the first that compresses
  /// What compression leaves is added to the next gradient. Without, it is lost. Remembered by
  /// every rank for whole compressed parameters: as large as these.
  bool error_feedback = true;
  engine::DType error_dtype = engine::DType::kF32;  ///< or bf16: half the memory, rounded once
  bool offload_error = false;    ///< errors lie in page-locked memory of the host
  bool warm_start = true;        ///< Q starts as that of the last step; otherwise it is drawn again
  double orthogonalize_eps = 0;  ///< added to the norms that columns are divided by
  std::uint64_t seed = 0;        ///< of the Q that are drawn
  /// Of hybrids: gradients are summed as they are inside replicas, and compressed between them.
  /// Ranks then remember errors of their shard alone. Otherwise between all ranks.
  bool across_replicas = false;
};

/// `uncompressed` makes what reduces before start_step. Throws InvalidArgument for options out of
/// range, and for across_replicas where gradients are not cut inside several of them.
std::unique_ptr<Reducer> make_powersgd(const ReducerContext& context,
                                       const PowerSgdOptions& options, Wire wire,
                                       const ReducerFactory& uncompressed);

}  // namespace tessera::shard

// GPU side of ops::sum, and the order of its additions. Private to ops.
//
// Chunks of kSumChunk elements; in each, lane l of kSumLanes adds up elements l, l + kSumLanes,
// ..., and then the upper half of the lanes is added to the lower until one is left. The sums of
// the chunks are added up in the same way.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tape.h"

namespace tessera::ops {

inline constexpr int kSumLanes = 1024;
inline constexpr std::int64_t kSumChunk = 64 * kSumLanes;

inline std::int64_t num_sum_chunks(std::int64_t numel) {
  return (numel + kSumChunk - 1) / kSumChunk;
}

/// `chunk_sums` has room for a double per chunk.
void sum_forward_cuda(const engine::Stream& stream, const engine::Tensor& y,
                      const engine::Tensor& x, const engine::Tensor& chunk_sums);
/// dx = or += dy, which has one element.
void sum_backward_cuda(const engine::Stream& stream, const engine::GradTarget& dx,
                       const engine::Tensor& dy);

}  // namespace tessera::ops

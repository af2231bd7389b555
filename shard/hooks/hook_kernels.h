// What communication hooks do to memory, as work of a stream, on its device. Addresses are taken
// when these are called; the tensors ride along. Tensors are f32 unless said otherwise.
#pragma once

#include <cstdint>
#include <string>

#include "engine/philox.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/layout.h"

namespace tessera::shard {

/// input = gradient + error, in f32; both f32 or bf16. `error` may be undefined: input = gradient.
void launch_add_error(const engine::Stream& stream, const engine::Tensor& input,
                      const engine::Tensor& gradient, const engine::Tensor& error,
                      const std::string& detail);

/// out[i] = element `i` of `random`, standard normal.
void launch_draw(const engine::Stream& stream, const engine::Tensor& out,
                 const engine::RandomStream& random, const std::string& detail);

/// What becomes of a column of which nothing is left, as those before it make it up.
struct LostColumns {
  bool replaced = false;             ///< by numbers of `random` if so, else by zero
  engine::RandomStream random = {};  ///< elements from matrix.numel() on
};

/// The columns of matrix (n, r), r <= n, become orthonormal, in place, from the first to the last:
/// each is made orthogonal to those before it, twice over, and divided by its norm. With `eps`
/// above 0 once, and divided by norm + eps, as PyTorch's hook does. Sums are double. A column of
/// which no more than rounding errors is left (1e-6 of its norm) is lost, so that of rank deficient
/// matrices fewer remain. Does nothing where `bad` (1) i64, which may be undefined, is not 0.
void launch_orthonormalize(const engine::Stream& stream, const engine::Tensor& matrix, double eps,
                           const LostColumns& lost, const engine::Tensor& bad,
                           const std::string& detail);

/// bad (1) i64 becomes 1 if some value is not finite.
void launch_look(const engine::Stream& stream, const engine::Tensor& bad,
                 const engine::Tensor& values, const std::string& detail);

/// sums /= count. Kept, if defined, becomes the same unless `bad` (1) i64 is not 0.
void launch_mean(const engine::Stream& stream, const engine::Tensor& sums, std::int64_t count,
                 const engine::Tensor& kept, const engine::Tensor& bad, const std::string& detail);

/// sum = or += count * mean; not a number where `bad` (1) i64 is not 0.
void launch_add_decompressed(const engine::Stream& stream, const engine::Tensor& sum,
                             const engine::Tensor& mean, std::int64_t count, bool accumulate,
                             const engine::Tensor& bad, const std::string& detail);

/// error = input - decompressed, rounded once to f32, and to bf16 if it is stored so. What it was
/// `before`, which may be the same memory, where `bad` (1) i64 is not 0, and in elements for which
/// the result is not finite.
void launch_keep_error(const engine::Stream& stream, const engine::Tensor& error,
                       const engine::Tensor& before, const engine::Tensor& input,
                       const engine::Tensor& decompressed, const engine::Tensor& bad,
                       const std::string& detail);

/// How a tensor is cut for a message of one block of `block_numel` words for each rank: to rank
/// r = replica * num_shards + shard goes the part of that shard that is this replica's.
struct HalfBlocks {
  std::int64_t num_ranks;
  std::int64_t num_shards;
  std::int64_t shard_numel;
  std::int64_t block_numel;  ///< shard_numel / replicas, rounded up

  /// The elements of a tensor of `numel` that go to rank `r`.
  constexpr Range of(std::int64_t r, std::int64_t numel) const {
    const std::int64_t shard = r % num_shards, in_shard = r / num_shards * block_numel;
    const std::int64_t begin = shard * shard_numel + in_shard;
    const std::int64_t end = begin + block_numel, last = (shard + 1) * shard_numel;
    const std::int64_t stop = end < last ? end : last, limit = stop < numel ? stop : numel;
    return {begin, limit > begin ? limit - begin : 0};
  }
};

/// words (2 * num_ranks * block_numel) u8 = the blocks of `in` (f32 or bf16) as binary16, 0 after
/// their last element.
void launch_pack_half(const engine::Stream& stream, const engine::Tensor& words,
                      const engine::Tensor& in, const HalfBlocks& blocks,
                      const std::string& detail);

/// out (n) = or += block 0 + block 1 + ..., rank by rank, of `words` (2 * num_ranks * block_numel)
/// u8; n is at most block_numel.
void launch_add_halves(const engine::Stream& stream, const engine::Tensor& out,
                       const engine::Tensor& words, std::int64_t num_ranks,
                       std::int64_t block_numel, bool accumulate, const std::string& detail);

}  // namespace tessera::shard

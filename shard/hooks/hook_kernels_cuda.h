// The kernels of hook_kernels.cc: the same arguments.
#pragma once

#include "shard/hooks/hook_kernels.h"

namespace tessera::shard {

void add_error_cuda(const engine::Stream& stream, const engine::Tensor& input,
                    const engine::Tensor& gradient, const engine::Tensor& error);
void draw_cuda(const engine::Stream& stream, const engine::Tensor& out,
               const engine::RandomStream& random);
void orthonormalize_cuda(const engine::Stream& stream, const engine::Tensor& matrix, double eps,
                         const LostColumns& lost, const engine::Tensor& bad);
void look_cuda(const engine::Stream& stream, const engine::Tensor& bad,
               const engine::Tensor& values);
void mean_cuda(const engine::Stream& stream, const engine::Tensor& sums, std::int64_t count,
               const engine::Tensor& kept, const engine::Tensor& bad);
void add_decompressed_cuda(const engine::Stream& stream, const engine::Tensor& sum,
                           const engine::Tensor& mean, std::int64_t count, bool accumulate,
                           const engine::Tensor& bad);
void keep_error_cuda(const engine::Stream& stream, const engine::Tensor& error,
                     const engine::Tensor& before, const engine::Tensor& input,
                     const engine::Tensor& decompressed, const engine::Tensor& bad);
void pack_half_cuda(const engine::Stream& stream, const engine::Tensor& words,
                    const engine::Tensor& in, const HalfBlocks& blocks);
void add_halves_cuda(const engine::Stream& stream, const engine::Tensor& out,
                     const engine::Tensor& words, std::int64_t num_ranks, std::int64_t block_numel,
                     bool accumulate);

}  // namespace tessera::shard

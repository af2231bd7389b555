// What collectives do to memory: copy, and sum in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/dtype.h"

namespace tessera::comm {

/// Whether what is written is read again soon (kCached), or is too big to stay in cache anyway
/// (kStreaming): then stores go around it, which saves reading each line before it is overwritten.
enum class Store { kCached, kStreaming };
/// kStreaming for collectives that write more than caches hold.
Store store_for(std::int64_t nbytes_written);

/// dst and src do not overlap.
void copy(void* dst, const void* src, std::int64_t nbytes, Store store);

/// out[i] = ((in_0[i] + in_1[i]) + in_2[i]) + ... for each of `outs` (f32); from `start` (f32, not
/// null) out[i] = ((start[i] + in_0[i]) + in_1[i]) + ... See [Note: rank order] in kernels.cc.
/// `dtype` of the ins: f32 or bf16. An out may equal an in or `start`, else they do not overlap.
void sum_in_rank_order(engine::DType dtype, std::span<const void* const> ins, const float* start,
                       std::span<float* const> outs, std::int64_t numel, Store store);

}  // namespace tessera::comm

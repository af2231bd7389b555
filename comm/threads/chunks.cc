#include "comm/threads/chunks.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "comm/threads/kernels.h"

namespace tessera::comm {
namespace {

constexpr std::int64_t kChunkNbytes = 64 << 10;
constexpr std::int64_t kChunkNumel = kChunkNbytes / std::int64_t{sizeof(float)};
// Waking a rank costs as much time as writing about this much.
constexpr std::int64_t kWakeNbytes = 256 << 10;

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Chunk `i` of [0, size), empty past the end.
struct Range {
  Range(std::int64_t size, std::int64_t i, std::int64_t chunk)
      : begin(std::min(size, i * chunk)), length(std::min(chunk, size - begin)) {}
  std::int64_t begin;
  std::int64_t length;
};

const std::byte* bytes(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* bytes(void* p) { return static_cast<std::byte*>(p); }

Chunks chunks(std::int64_t num_per_block, std::int64_t nbytes_written,
              std::function<void(std::span<const Slot>, int, std::int64_t)> run) {
  return {
      .num_per_block = num_per_block, .wake = nbytes_written > kWakeNbytes, .run = std::move(run)};
}

// A block is what one rank brings: read once, written to all.
Chunks all_gather_chunks(std::int64_t in_nbytes, int size) {
  const std::int64_t written = in_nbytes * size * size;
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t chunk) {
    const Range r(in_nbytes, chunk, kChunkNbytes);
    const std::byte* src = bytes(slots[static_cast<std::size_t>(block)].in) + r.begin;
    for (const Slot& to : slots) {
      std::byte* dst = bytes(to.out) + block * in_nbytes + r.begin;
      if (dst != src) copy(dst, src, r.length, store);
    }
  };
  return chunks(div_up(in_nbytes, kChunkNbytes), written, run);
}

// A block is what one rank receives: its part of every input, summed.
Chunks reduce_scatter_chunks(engine::DType in_dtype, std::int64_t out_numel, Accumulate accumulate,
                             int size) {
  const std::int64_t written = out_numel * size * std::int64_t{sizeof(float)};
  const auto run = [=, store = store_for(written),
                    ins = std::vector<const void*>(static_cast<std::size_t>(size))](
                       std::span<const Slot> slots, int block, std::int64_t chunk) mutable {
    const Range r(out_numel, chunk, kChunkNumel);
    const std::int64_t offset = (block * out_numel + r.begin) * size_of(in_dtype);
    for (std::size_t i = 0; i < slots.size(); ++i) ins[i] = bytes(slots[i].in) + offset;
    float* out = static_cast<float*>(slots[static_cast<std::size_t>(block)].out) + r.begin;
    const float* start = accumulate == Accumulate::kYes ? out : nullptr;
    sum_in_rank_order(in_dtype, ins, start, {&out, 1}, r.length, store);
  };
  return chunks(div_up(out_numel, kChunkNumel), written, run);
}

// A block is an equal share. The running sum is read from rank 0, where it is as everywhere.
Chunks all_reduce_chunks(engine::DType in_dtype, std::int64_t numel, Accumulate accumulate,
                         int size) {
  const std::int64_t num_per_block = div_up(div_up(numel, kChunkNumel), size);
  const std::int64_t written = numel * size * std::int64_t{sizeof(float)};
  const auto run = [=, store = store_for(written),
                    ins = std::vector<const void*>(static_cast<std::size_t>(size)),
                    outs = std::vector<float*>(static_cast<std::size_t>(size))](
                       std::span<const Slot> slots, int block, std::int64_t chunk) mutable {
    const Range r(numel, block * num_per_block + chunk, kChunkNumel);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      ins[i] = bytes(slots[i].in) + r.begin * size_of(in_dtype);
      outs[i] = static_cast<float*>(slots[i].out) + r.begin;
    }
    const float* start = accumulate == Accumulate::kYes ? outs[0] : nullptr;
    sum_in_rank_order(in_dtype, ins, start, outs, r.length, store);
  };
  return chunks(num_per_block, written, run);
}

// A block is an equal share. Slots hold the same pointer as in and out.
Chunks broadcast_chunks(std::int64_t nbytes, int root, int size) {
  const std::int64_t num_per_block = div_up(div_up(nbytes, kChunkNbytes), size);
  const std::int64_t written = nbytes * (size - 1);
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t chunk) {
    const Range r(nbytes, block * num_per_block + chunk, kChunkNbytes);
    const std::byte* src = bytes(slots[static_cast<std::size_t>(root)].in) + r.begin;
    for (const Slot& to : slots) {
      std::byte* dst = bytes(to.out) + r.begin;
      if (dst != src) copy(dst, src, r.length, store);
    }
  };
  return chunks(num_per_block, written, run);
}

// A block is what one rank receives, `part_nbytes` from each.
Chunks all_to_all_chunks(std::int64_t part_nbytes, int size) {
  const std::int64_t written = part_nbytes * size * size;
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t chunk) {
    const Range r(part_nbytes, chunk, kChunkNbytes);
    std::byte* dst = bytes(slots[static_cast<std::size_t>(block)].out) + r.begin;
    for (const Slot& from : slots) {
      copy(dst, bytes(from.in) + block * part_nbytes + r.begin, r.length, store);
      dst += part_nbytes;
    }
  };
  return chunks(div_up(part_nbytes, kChunkNbytes), written, run);
}

}  // namespace

Chunks chunks_of(const Collective& c, int size) {
  switch (c.op) {
    case Collective::Op::kAllGather:
      return all_gather_chunks(c.in.nbytes(), size);
    case Collective::Op::kReduceScatter:
      return reduce_scatter_chunks(c.in.dtype(), c.out.numel(), c.accumulate, size);
    case Collective::Op::kAllReduce:
      return all_reduce_chunks(c.in.dtype(), c.out.numel(), c.accumulate, size);
    case Collective::Op::kBroadcast:
      return broadcast_chunks(c.in.nbytes(), c.root, size);
    case Collective::Op::kAllToAll:
      return all_to_all_chunks(c.in.nbytes() / size, size);
  }
  return {};
}

}  // namespace tessera::comm

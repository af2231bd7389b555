#include "comm/threads/chunks.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "comm/threads/kernels.h"

namespace tessera::comm {
namespace {

constexpr std::int64_t kPieceNbytes = 64 << 10;
constexpr std::int64_t kPieceNumel = kPieceNbytes / std::int64_t{sizeof(float)};
// Waking a rank costs as much time as writing about this much.
constexpr std::int64_t kWakeNbytes = 256 << 10;

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Piece `i` of [0, size), empty past the end.
struct Range {
  Range(std::int64_t size, std::int64_t i, std::int64_t piece)
      : begin(std::min(size, i * piece)), length(std::min(piece, size - begin)) {}
  std::int64_t begin;
  std::int64_t length;
};

const std::byte* bytes(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* bytes(void* p) { return static_cast<std::byte*>(p); }

Pieces pieces(std::int64_t num_per_block, std::int64_t nbytes_written,
              std::function<void(std::span<const Slot>, int, std::int64_t)> run) {
  return {
      .num_per_block = num_per_block, .wake = nbytes_written > kWakeNbytes, .run = std::move(run)};
}

// A block is what one rank brings: read once, written to all.
Pieces all_gather_pieces(std::int64_t in_nbytes, int size) {
  const std::int64_t written = in_nbytes * size * size;
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t piece) {
    const Range r(in_nbytes, piece, kPieceNbytes);
    const std::byte* src = bytes(slots[static_cast<std::size_t>(block)].in) + r.begin;
    for (const Slot& to : slots) {
      std::byte* dst = bytes(to.out) + block * in_nbytes + r.begin;
      if (dst != src) copy(dst, src, r.length, store);
    }
  };
  return pieces(div_up(in_nbytes, kPieceNbytes), written, run);
}

// A block is what one rank receives: its part of every input, summed.
Pieces reduce_scatter_pieces(engine::DType in_dtype, std::int64_t out_numel, Accumulate accumulate,
                             int size) {
  const std::int64_t written = out_numel * size * std::int64_t{sizeof(float)};
  const auto run = [=, store = store_for(written),
                    ins = std::vector<const void*>(static_cast<std::size_t>(size))](
                       std::span<const Slot> slots, int block, std::int64_t piece) mutable {
    const Range r(out_numel, piece, kPieceNumel);
    const std::int64_t offset = (block * out_numel + r.begin) * size_of(in_dtype);
    for (std::size_t i = 0; i < slots.size(); ++i) ins[i] = bytes(slots[i].in) + offset;
    float* out = static_cast<float*>(slots[static_cast<std::size_t>(block)].out) + r.begin;
    const float* start = accumulate == Accumulate::kYes ? out : nullptr;
    sum_in_rank_order(in_dtype, ins, start, {&out, 1}, r.length, store);
  };
  return pieces(div_up(out_numel, kPieceNumel), written, run);
}

// A block is an equal share. The running sum is read from rank 0, where it is as everywhere.
Pieces all_reduce_pieces(engine::DType in_dtype, std::int64_t numel, Accumulate accumulate,
                         int size) {
  const std::int64_t num_per_block = div_up(div_up(numel, kPieceNumel), size);
  const std::int64_t written = numel * size * std::int64_t{sizeof(float)};
  const auto run = [=, store = store_for(written),
                    ins = std::vector<const void*>(static_cast<std::size_t>(size)),
                    outs = std::vector<float*>(static_cast<std::size_t>(size))](
                       std::span<const Slot> slots, int block, std::int64_t piece) mutable {
    const Range r(numel, block * num_per_block + piece, kPieceNumel);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      ins[i] = bytes(slots[i].in) + r.begin * size_of(in_dtype);
      outs[i] = static_cast<float*>(slots[i].out) + r.begin;
    }
    const float* start = accumulate == Accumulate::kYes ? outs[0] : nullptr;
    sum_in_rank_order(in_dtype, ins, start, outs, r.length, store);
  };
  return pieces(num_per_block, written, run);
}

// A block is an equal share. Slots hold the same pointer as in and out.
Pieces broadcast_pieces(std::int64_t nbytes, int root, int size) {
  const std::int64_t num_per_block = div_up(div_up(nbytes, kPieceNbytes), size);
  const std::int64_t written = nbytes * (size - 1);
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t piece) {
    const Range r(nbytes, block * num_per_block + piece, kPieceNbytes);
    const std::byte* src = bytes(slots[static_cast<std::size_t>(root)].in) + r.begin;
    for (const Slot& to : slots) {
      std::byte* dst = bytes(to.out) + r.begin;
      if (dst != src) copy(dst, src, r.length, store);
    }
  };
  return pieces(num_per_block, written, run);
}

// A block is what one rank receives, `part_nbytes` from each.
Pieces all_to_all_pieces(std::int64_t part_nbytes, int size) {
  const std::int64_t written = part_nbytes * size * size;
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t piece) {
    const Range r(part_nbytes, piece, kPieceNbytes);
    std::byte* dst = bytes(slots[static_cast<std::size_t>(block)].out) + r.begin;
    for (const Slot& from : slots) {
      copy(dst, bytes(from.in) + block * part_nbytes + r.begin, r.length, store);
      dst += part_nbytes;
    }
  };
  return pieces(div_up(part_nbytes, kPieceNbytes), written, run);
}

}  // namespace

Pieces pieces_of(const Collective& c, int size) {
  switch (c.op) {
    case Collective::Op::kAllGather:
      return all_gather_pieces(c.in.nbytes(), size);
    case Collective::Op::kReduceScatter:
      return reduce_scatter_pieces(c.in.dtype(), c.out.numel(), c.accumulate, size);
    case Collective::Op::kAllReduce:
      return all_reduce_pieces(c.in.dtype(), c.out.numel(), c.accumulate, size);
    case Collective::Op::kBroadcast:
      return broadcast_pieces(c.in.nbytes(), c.root, size);
    case Collective::Op::kAllToAll:
      return all_to_all_pieces(c.in.nbytes() / size, size);
  }
  return {};
}

}  // namespace tessera::comm

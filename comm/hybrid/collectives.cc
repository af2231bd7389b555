#include "comm/hybrid/collectives.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/hybrid/chain.h"
#include "comm/messages/collectives.h"
#include "comm/threads/kernels.h"

namespace tessera::comm {
namespace {

constexpr std::int64_t kChunkNbytes = 64 << 10;
// Waking a rank costs as much time as writing about this much.
constexpr std::int64_t kWakeNbytes = 256 << 10;

// The first rank here receives what the others have, too.
void all_gather(const HybridCall& call) {
  const std::int64_t part = call.collective().in.nbytes();
  call.for_others([&](int process, int rank) {
    call.messages.receive(process, call.shares.front()->out + rank * part, part);
  });
  for (int p = 0; p < call.between.size(); ++p) {
    if (p == call.between.rank()) continue;
    for (const auto& share : call.shares) call.messages.send(p, share->in, part);
  }
  call.messages.wait();
}

// Which rank here has a broadcast first: the root, or who receives it for all.
int first_of_broadcast(const Collective& c, int first, int num_here) {
  return c.root >= first && c.root < first + num_here ? c.root - first : 0;
}

// Meets the others.
void broadcast(const HybridCall& call) {
  const Collective& c = call.collective();
  const auto has = static_cast<std::size_t>(first_of_broadcast(c, call.first, call.num_here()));
  const Tensor& inout = call.shares[has]->collective.in;
  Collective between{
      .op = c.op, .in = inout, .out = inout, .root = call.between.rank(), .work = {}};
  call.for_others([&](int process, int rank) {
    if (rank == c.root) between.root = process;
  });
  carry_out(between, {}, call.between.rank(), call.between.size(), call.messages);
}

// From the first sender's parts to the last one's, as both sides count them.
void all_to_all(const HybridCall& call) {
  const auto size = static_cast<std::int64_t>(ranks_of(call.between.processes()).size());
  const std::int64_t part = call.collective().in.nbytes() / size;
  call.for_others([&](int process, int rank) {
    for (const auto& share : call.shares) {
      call.messages.receive(process, share->out + rank * part, part);
    }
  });
  for (const auto& share : call.shares) {
    call.for_others(
        [&](int process, int rank) { call.messages.send(process, share->in + rank * part, part); });
  }
  call.messages.wait();
}

const HybridShare& share_of(std::span<const Slot> slots, std::int64_t i) {
  return *static_cast<const HybridShare*>(slots[static_cast<std::size_t>(i)].out);
}

// For each rank here copies of `num_copies` runs of `nbytes`, of which source(slots, rank, copy)
// and target() say where they are.
template <class Source, class Target>
Chunks copies(int num_here, std::int64_t num_copies, std::int64_t nbytes, Source source,
              Target target) {
  const std::int64_t num_chunks = (nbytes + kChunkNbytes - 1) / kChunkNbytes;
  const std::int64_t written = num_here * num_copies * nbytes;
  const auto run = [=, store = store_for(written)](std::span<const Slot> slots, int block,
                                                   std::int64_t chunk) {
    const std::int64_t copy = chunk / num_chunks, begin = chunk % num_chunks * kChunkNbytes;
    const std::byte* const from = source(slots, block, copy);
    std::byte* const to = target(slots, block, copy);
    if (from == to) return;
    comm::copy(to + begin, from + begin, std::min(kChunkNbytes, nbytes - begin), store);
  };
  return {.num_per_block = num_copies * num_chunks, .wake = written > kWakeNbytes, .run = run};
}

}  // namespace

void exchange_between(const HybridCall& call) {
  const bool is_empty = call.collective().in.numel() == 0;
  if (is_empty || call.collective().op != Collective::Op::kBroadcast) call.messages.meet();
  if (is_empty) return;
  switch (call.collective().op) {
    case Collective::Op::kAllGather:
      return all_gather(call);
    case Collective::Op::kReduceScatter:
    case Collective::Op::kAllReduce:
      return reduce_in_chain(call);
    case Collective::Op::kBroadcast:
      return broadcast(call);
    case Collective::Op::kAllToAll:
      return all_to_all(call);
  }
}

Chunks chunks_inside(const Collective& c, int size, int first, int num_here) {
  const auto out_of = [](std::span<const Slot> slots, int to, std::int64_t) {
    return share_of(slots, to).out;
  };
  switch (c.op) {
    case Collective::Op::kAllGather: {
      const std::int64_t part = c.in.nbytes();
      return copies(
          num_here, size, part,
          [=](std::span<const Slot> slots, int, std::int64_t rank) -> const std::byte* {
            const bool is_here = rank >= first && rank < first + num_here;
            return is_here ? share_of(slots, rank - first).in
                           : share_of(slots, 0).out + rank * part;
          },
          [=](std::span<const Slot> slots, int to, std::int64_t rank) {
            return share_of(slots, to).out + rank * part;
          });
    }
    case Collective::Op::kReduceScatter:
      return {};
    case Collective::Op::kAllReduce:
    case Collective::Op::kBroadcast: {
      const int has =
          c.op == Collective::Op::kBroadcast ? first_of_broadcast(c, first, num_here) : 0;
      return copies(
          num_here, 1, c.out.nbytes(),
          [has](std::span<const Slot> slots, int, std::int64_t) -> const std::byte* {
            return share_of(slots, has).out;
          },
          out_of);
    }
    case Collective::Op::kAllToAll: {
      const std::int64_t part = c.in.nbytes() / size;
      return copies(
          num_here, num_here, part,
          [=](std::span<const Slot> slots, int to, std::int64_t from) -> const std::byte* {
            return share_of(slots, from).in + (first + to) * part;
          },
          [=](std::span<const Slot> slots, int to, std::int64_t from) {
            return share_of(slots, to).out + (first + from) * part;
          });
    }
  }
  return {};
}

}  // namespace tessera::comm

// What a rank brings to a call in which it shares a process with others.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/messages/message_rank.h"
#include "comm/messages/messages.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// Stays until the last message of the call is done: that may be long after the call has failed,
/// when buffers have been released.
struct HybridShare : std::enable_shared_from_this<HybridShare> {
  Collective collective;
  Tensor staging;  ///< chain_nbytes(); undefined for none
  std::shared_ptr<const void> in_slot, out_slot;
  std::byte *in = nullptr, *out = nullptr;          ///< where its tensors begin
  std::chrono::steady_clock::time_point came = {};  ///< when its rank came to the call
};

/// This process in a call: its ranks, which follow each other in the group, and the others.
struct HybridCall {
  std::vector<std::shared_ptr<HybridShare>> shares;  ///< of its ranks
  int first;                                         ///< which rank of the group the first one is
  const MessageRank& between;                        ///< this process among those of the group
  Messages& messages;

  int num_here() const { return static_cast<int>(shares.size()); }
  bool is_here(std::int64_t rank) const { return rank >= first && rank < first + num_here(); }
  const Collective& collective() const { return shares.front()->collective; }
  /// Of a rank that is here.
  const HybridShare& of(std::int64_t rank) const {
    return *shares[static_cast<std::size_t>(rank - first)];
  }
  /// fn(process, rank) for each rank of the group that is in another process.
  template <class F>
  void for_others(F fn) const {
    int rank = 0;
    for (int p = 0; p < between.size(); ++p) {
      for (std::size_t i = 0; i < between.ranks(p).size(); ++i, ++rank) {
        if (p != between.rank()) fn(p, rank);
      }
    }
  }
};

}  // namespace tessera::comm

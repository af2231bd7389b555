// Equally large slots that units borrow. Their number is the rate limiter, the memory ceiling and
// the cross-stream safety in one: a slot carries the moment of its last use, and whoever borrows it
// next must wait for that moment.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "engine/buffer.h"
#include "engine/stream.h"

namespace tessera::shard {

class SlotRing {
 public:
  struct Slot {
    std::shared_ptr<engine::Buffer> buffer;
    engine::Event last_use;     ///< of the previous borrower
    std::string borrower = {};  ///< unit name; empty: free
    /// Gives the slot back if the borrower is not computing with it; returns whether it did.
    std::function<bool()> evict = {};
  };

  /// `count` slots of `nbytes` each, allocated now.
  SlotRing(const engine::Memory& memory, std::string name, std::int64_t nbytes, int count,
           engine::Category category);

  /// Whether one of at least `nbytes` is free.
  bool has_free(std::int64_t nbytes) const;
  /// A free slot of at least `nbytes`; if there is none, evicts a borrower that can be. When all
  /// are at work (units nested deeper than the ring, gradients that are kept) the ring grows by a
  /// slot of `nbytes`, which stays until shrink().
  Slot& borrow(const std::string& borrower, std::int64_t nbytes, std::function<bool()> evict);
  /// `last_use`: when the borrower's last work on the slot is done.
  void give_back(Slot& slot, engine::Event last_use);
  std::size_t size() const { return slots_.size(); }
  /// Frees the slots that the ring has beyond `count`, which are given back and of which no work is
  /// on its way.
  void shrink(std::size_t count);

 private:
  Slot* next_free(std::int64_t nbytes);
  Slot& grow(std::int64_t nbytes);

  engine::Memory memory_;
  std::string name_;
  engine::Category category_;
  std::deque<Slot> slots_;  // addresses stay
  std::size_t next_ = 0;
};

}  // namespace tessera::shard

// A fixed ring of equally large slots that units borrow. The ring is the rate limiter, the memory
// ceiling and the cross-stream safety in one: a slot carries the moment of its last use, and
// whoever borrows it next must wait for that moment.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

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
  SlotRing(const engine::Memory& memory, const std::string& name, std::int64_t nbytes, int count,
           engine::Category category);

  bool has_free() const;
  /// A free slot; if there is none, evicts a borrower that can be. Throws InvalidArgument naming
  /// the borrowers when all are at work: units are nested deeper than the ring.
  Slot& borrow(const std::string& borrower, std::function<bool()> evict);
  /// `last_use`: when the borrower's last work on the slot is done.
  void give_back(Slot& slot, engine::Event last_use);

 private:
  Slot* next_free();

  std::string name_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

}  // namespace tessera::shard

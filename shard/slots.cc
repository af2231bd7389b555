#include "shard/slots.h"

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {

SlotRing::SlotRing(const engine::Memory& memory, const std::string& name, std::int64_t nbytes,
                   int count, engine::Category category)
    : name_(name) {
  for (int i = 0; i < count; ++i) {
    slots_.push_back(
        {engine::Buffer::create(memory, name + "." + std::to_string(i), nbytes, category), {}});
  }
}

bool SlotRing::has_free() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.borrower.empty(); });
}

SlotRing::Slot* SlotRing::next_free() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[(next_ + i) % slots_.size()];
    if (!slot.borrower.empty()) continue;
    next_ = (next_ + i + 1) % slots_.size();
    return &slot;
  }
  return nullptr;
}

SlotRing::Slot& SlotRing::borrow(const std::string& borrower, std::function<bool()> evict) {
  Slot* slot = next_free();
  if (slot == nullptr) {
    std::string at_work;
    for (Slot& candidate : slots_) {
      at_work += (at_work.empty() ? "" : ", ") + candidate.borrower;
      const auto evict = candidate.evict;  // a copy: giving back clears the slot's own
      if (evict()) break;
    }
    slot = next_free();
    engine::require(slot != nullptr,
                    "[slots] expected a free slot of {} for '{}', got all at work in {}: a unit "
                    "must not run inside another one, except inside the root",
                    name_, borrower, at_work);
  }
  slot->borrower = borrower;
  slot->evict = std::move(evict);
  return *slot;
}

void SlotRing::give_back(Slot& slot, engine::Event last_use) {
  slot.last_use = std::move(last_use);
  slot.borrower.clear();
  slot.evict = {};
}

}  // namespace tessera::shard

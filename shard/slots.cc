#include "shard/slots.h"

#include <algorithm>
#include <utility>

namespace tessera::shard {

SlotRing::SlotRing(const engine::Memory& memory, std::string name, std::int64_t nbytes, int count,
                   engine::Category category)
    : memory_(memory), name_(std::move(name)), category_(category) {
  for (int i = 0; i < count; ++i) grow(nbytes);
}

SlotRing::Slot& SlotRing::grow(std::int64_t nbytes) {
  const std::string name = name_ + "." + std::to_string(slots_.size());
  slots_.push_back({engine::Buffer::create(memory_, name, nbytes, category_), {}});
  return slots_.back();
}

void SlotRing::shrink(std::size_t count) {
  while (slots_.size() > count) slots_.pop_back();
}

bool SlotRing::has_free(std::int64_t nbytes) const {
  return std::ranges::any_of(slots_, [&](const Slot& slot) {
    return slot.borrower.empty() && slot.buffer->nbytes() >= nbytes;
  });
}

SlotRing::Slot* SlotRing::next_free(std::int64_t nbytes) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[(next_ + i) % slots_.size()];
    if (!slot.borrower.empty() || slot.buffer->nbytes() < nbytes) continue;
    next_ = (next_ + i + 1) % slots_.size();
    return &slot;
  }
  return nullptr;
}

SlotRing::Slot& SlotRing::borrow(const std::string& borrower, std::int64_t nbytes,
                                 std::function<bool()> evict) {
  Slot* slot = next_free(nbytes);
  for (Slot& candidate : slots_) {
    if (slot != nullptr) break;
    if (candidate.borrower.empty() || candidate.buffer->nbytes() < nbytes) continue;
    const auto evict_it = candidate.evict;  // a copy: giving back clears the slot's own
    if (evict_it()) slot = next_free(nbytes);
  }
  if (slot == nullptr) {
    slot = &grow(nbytes);
    slot->last_use = memory_.allocated();  // it may be memory of a tensor that compute still reads
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

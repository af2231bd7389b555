// Which slot is lent to whom, where slots differ in size: a ring grows by what is asked for.
#include "shard/slots.h"

#include <gtest/gtest.h>

#include "engine/memory.h"

namespace tessera::shard {
namespace {

// A slot of 100 bytes that stays at work, and one of 10 that the ring grew by.
class SlotsOfTwoSizes : public ::testing::Test {
 protected:
  SlotsOfTwoSizes() {
    ring.borrow("large", 100, [] { return false; });
    small = &ring.borrow("small", 10, [this] {
      ring.give_back(*small, {});
      ++num_evictions;
      return true;
    });
  }
  SlotRing::Slot& borrow(std::int64_t nbytes) {
    return ring.borrow("another", nbytes, [] { return false; });
  }

  engine::Memory memory;
  SlotRing ring{memory, "slot", 100, 1, engine::Category::kGradient};
  SlotRing::Slot* small = nullptr;
  int num_evictions = 0;
};

TEST_F(SlotsOfTwoSizes, OneThatIsTooSmallIsNotFree) {
  EXPECT_FALSE(ring.has_free(1));
  ring.give_back(*small, {});
  EXPECT_TRUE(ring.has_free(10));
  EXPECT_FALSE(ring.has_free(11));
  EXPECT_EQ(borrow(11).buffer->nbytes(), 11);
  EXPECT_EQ(ring.size(), 3u);
  EXPECT_EQ(&borrow(10), small);
}

TEST_F(SlotsOfTwoSizes, OneThatIsTooSmallIsNotEvicted) {
  EXPECT_EQ(borrow(11).buffer->nbytes(), 11);
  EXPECT_EQ(num_evictions, 0);
  EXPECT_EQ(&borrow(10), small);
  EXPECT_EQ(num_evictions, 1);
  EXPECT_EQ(ring.size(), 3u);
}

TEST_F(SlotsOfTwoSizes, ThoseThatTheRingGrewByAreFreed) {
  ring.give_back(*small, {});
  ring.shrink(1);
  EXPECT_EQ(ring.size(), 1u);
  EXPECT_EQ(memory.stats().total_nbytes, 100);
  EXPECT_FALSE(ring.has_free(1));
  EXPECT_EQ(borrow(10).buffer->nbytes(), 10);
}

}  // namespace
}  // namespace tessera::shard

// Every byte is counted, by category; peaks are exact; freed blocks are reused; NaN fills what
// nobody wrote.
#include "engine/memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/buffer.h"
#include "engine/error.h"
#include "engine/out_of_memory.h"
#include "engine/sanitizers.h"
#include "tests/testing/errors.h"

namespace tessera::engine {
namespace {

std::int64_t of(const std::array<std::int64_t, kNumCategories>& counts, Category category) {
  return counts[static_cast<std::size_t>(category)];
}

TEST(Memory, CountsCurrentAndPeakByCategory) {
  Memory memory;
  std::byte* a = memory.allocate(1000, Category::kActivation);
  std::byte* b = memory.allocate(300, Category::kGradient);
  memory.free(a, 1000, Category::kActivation);
  std::byte* c = memory.allocate(700, Category::kGradient);
  const MemoryStats stats = memory.stats();
  EXPECT_EQ(of(stats.current_nbytes, Category::kActivation), 0);
  EXPECT_EQ(of(stats.current_nbytes, Category::kGradient), 1000);
  EXPECT_EQ(of(stats.peak_nbytes, Category::kActivation), 1000);
  EXPECT_EQ(of(stats.peak_nbytes, Category::kGradient), 1000);
  EXPECT_EQ(of(stats.peak_nbytes, Category::kOptimizer), 0);
  EXPECT_EQ(stats.total_nbytes, 1000);
  EXPECT_EQ(stats.peak_total_nbytes, 1300) << "a and b, before c";
  memory.free(b, 300, Category::kGradient);
  memory.free(c, 700, Category::kGradient);
  EXPECT_EQ(memory.stats().total_nbytes, 0);
  EXPECT_EQ(memory.stats().peak_total_nbytes, 1300);
}

TEST(Memory, ResetPeaksStartsFromTheCurrentValues) {
  Memory memory;
  std::byte* a = memory.allocate(5000, Category::kWorkspace);
  std::byte* b = memory.allocate(10, Category::kOptimizer);
  memory.free(a, 5000, Category::kWorkspace);
  memory.reset_peaks();
  EXPECT_EQ(of(memory.stats().peak_nbytes, Category::kWorkspace), 0);
  EXPECT_EQ(of(memory.stats().peak_nbytes, Category::kOptimizer), 10);
  EXPECT_EQ(memory.stats().peak_total_nbytes, 10);
  memory.free(b, 10, Category::kOptimizer);
}

TEST(Memory, FreedBlocksAreReusedUnlessToldNotTo) {
  for (const bool cache : {true, false}) {
    Memory memory({.cache = cache});
    for (int step = 0; step < 10; ++step) {
      std::vector<std::byte*> blocks;
      for (const std::int64_t nbytes : {1, 255, 256, 257, 70'000, 3 << 20}) {
        blocks.push_back(memory.allocate(nbytes, Category::kActivation));
        std::memset(blocks.back(), 1, static_cast<std::size_t>(nbytes));
      }
      const std::int64_t reserved = memory.stats().reserved_nbytes;
      EXPECT_GE(reserved, memory.stats().total_nbytes);
      EXPECT_LE(reserved, memory.stats().total_nbytes * 11 / 10 + 5 * 256);
      std::size_t i = 0;
      for (const std::int64_t nbytes : {1, 255, 256, 257, 70'000, 3 << 20}) {
        memory.free(blocks[i++], nbytes, Category::kActivation);
      }
      EXPECT_EQ(memory.stats().reserved_nbytes, cache ? reserved : 0);
    }
  }
}

// What a step of one shape asks for: all of it is in use at one time.
void allocate_and_free(Memory& memory, const std::vector<std::int64_t>& sizes) {
  std::vector<std::byte*> blocks;
  for (const std::int64_t nbytes : sizes) {
    blocks.push_back(memory.allocate(nbytes, Category::kActivation));
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    memory.free(blocks[i], sizes[i], Category::kActivation);
  }
}

TEST(Memory, StepsOfOneShapeAskTheSystemOnce) {
  Memory memory;
  const std::vector<std::int64_t> forward = {1 << 20, 3 << 20, 700, 1 << 20}, backward = {2 << 20};
  for (int step = 0; step < 10; ++step) {
    allocate_and_free(memory, forward);
    allocate_and_free(memory, backward);
    EXPECT_EQ(memory.stats().num_reservations, 5);
  }
}

TEST(Memory, WhatIsHeldIsBoundedWhereShapesVary) {
  Memory memory;
  for (std::int64_t tokens = 1; tokens <= 300; ++tokens) {
    allocate_and_free(memory, {tokens * 4096, tokens * 4096, tokens * 12'288});
    const MemoryStats stats = memory.stats();
    EXPECT_LE(stats.reserved_nbytes, static_cast<std::int64_t>(Memory::kMaxReserved * 1.05 *
                                                               double(stats.peak_total_nbytes)));
  }
  // Small ones after large ones are within the bound, and then they are there.
  for (int again = 0; again < 2; ++again) {
    const std::int64_t before = memory.stats().num_reservations;
    for (std::int64_t tokens = 1; tokens <= 10; ++tokens) {
      allocate_and_free(memory, {tokens * 4096});
    }
    EXPECT_EQ(memory.stats().num_reservations - before, again == 0 ? 10 : 0) << again;
  }
  // Large ones again: those that have lain longest go, and what was used just now stays.
  allocate_and_free(memory, {300 * 4096, 300 * 4096, 300 * 12'288});
  const std::int64_t before = memory.stats().num_reservations;
  for (std::int64_t tokens = 1; tokens <= 10; ++tokens) {
    allocate_and_free(memory, {tokens * 4096});
  }
  EXPECT_EQ(memory.stats().num_reservations, before);
}

TEST(Memory, ABlockServesRequestsOfAboutItsSizeOnly) {
  Memory memory;
  std::byte* a = memory.allocate(1000, Category::kActivation);
  memory.free(a, 1000, Category::kActivation);
  std::byte* b = memory.allocate(2000, Category::kActivation);
  EXPECT_NE(a, b);
  std::byte* c = memory.allocate(1020, Category::kGradient);
  EXPECT_EQ(a, c);
  memory.free(b, 2000, Category::kActivation);
  memory.free(c, 1020, Category::kGradient);
  EXPECT_EQ(memory.stats().total_nbytes, 0);
}

TEST(Memory, BlocksAreAligned) {
  Memory memory;
  for (const std::int64_t nbytes : {0, 1, 300, 65'536, (2 << 20) - 1, 2 << 20, (5 << 20) + 1}) {
    std::byte* data = memory.allocate(nbytes, Category::kWorkspace);
    ASSERT_NE(data, nullptr);
    const std::uintptr_t alignment = nbytes >= 2 << 20 ? 2 << 20 : 256;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % alignment, 0u) << nbytes;
    memory.free(data, nbytes, Category::kWorkspace);
  }
}

// What /proc/self/smaps says of the mapping that `address` lies in.
struct Mapping {
  std::int64_t huge_kib = 0;  // in huge pages
  bool is_advised = false;    // to be in huge pages
};

Mapping mapping_of(const std::byte* address) {
  std::ifstream smaps("/proc/self/smaps");
  Mapping mapping;
  bool is_here = false;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(word.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) == 2) {
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      is_here = begin <= at && at < end;
    } else if (is_here && word == "AnonHugePages:") {
      words >> mapping.huge_kib;
    } else if (is_here && word == "VmFlags:") {
      mapping.is_advised = line.find(" hg ") != std::string::npos;
    }
  }
  return mapping;
}

// Activations and slots: of 512 times fewer pages the CPU finds nearly all at once.
TEST(Memory, LargeBlocksLieInHugePages) {
  // Empty: a kernel without huge pages.
  std::string mode;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), mode);
  const bool gives = !mode.empty() && mode.find("[never]") == std::string::npos;
  constexpr std::int64_t kNbytes = 64 << 20;
  Memory memory;
  std::byte* block = memory.allocate(kNbytes, Category::kActivation);
  std::memset(block, 1, kNbytes);
  const Mapping mapping = mapping_of(block + kNbytes / 2);
  EXPECT_EQ(mapping.is_advised, !mode.empty());
  if (gives) {
    EXPECT_GE(mapping.huge_kib, kNbytes / 1024 / 2);
  } else {
    EXPECT_EQ(mapping.huge_kib, 0);
  }
  memory.free(block, kNbytes, Category::kActivation);
}

TEST(Memory, MoreThanThereIsNamesCategoryAndSize) {
  Memory memory;
  const std::int64_t nbytes = std::int64_t{1} << 60;
  EXPECT_TRUE(tessera::testing::has(tessera::testing::error_of<DeviceError>(
                                        [&] { memory.allocate(nbytes, Category::kOptimizer); }),
                                    {"[memory]", std::to_string(nbytes), "optimizer"}));
  EXPECT_EQ(memory.stats().total_nbytes, 0);
  EXPECT_EQ(memory.stats().reserved_nbytes, 0);
}

// Not with sanitizers, which keep freed memory and map terabytes of their own.
#if !defined(TESSERA_ASAN) && !defined(TESSERA_TSAN)

// Whether a block of 96 MiB can be had where there is room for 128 MiB, and 64 MiB of it were used
// and freed before. In a process of its own, which the limit ends with.
[[noreturn]] void allocate_beyond_the_cache(bool cache) {
  constexpr std::int64_t kMiB = 1 << 20;
  std::int64_t num_pages = 0;
  std::ifstream("/proc/self/statm") >> num_pages;
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = static_cast<rlim_t>(num_pages * sysconf(_SC_PAGESIZE) + 128 * kMiB);
  setrlimit(RLIMIT_AS, &limit);
  Memory memory({.cache = cache});
  std::byte* kept = memory.allocate(64 * kMiB, Category::kActivation);
  memory.free(kept, 64 * kMiB, Category::kActivation);
  const std::int64_t reserved = memory.stats().reserved_nbytes;
  memory.allocate(96 * kMiB, Category::kActivation);
  // What was given back is not in stock.
  bool is_refused = false;
  try {
    memory.allocate(64 * kMiB, Category::kActivation);
  } catch (const DeviceError&) {
    is_refused = true;
  }
  const bool is_right = is_refused && reserved == (cache ? 64 * kMiB : 0) &&
                        memory.stats().reserved_nbytes == 96 * kMiB &&
                        memory.stats().total_nbytes == 96 * kMiB;
  std::_Exit(is_right ? 0 : 1);
}

TEST(Memory, KeptBlocksAreGivenBackWhenThereIsNoRoomElse) {
  for (const bool cache : {false, true}) {
    EXPECT_EXIT(allocate_beyond_the_cache(cache), ::testing::ExitedWithCode(0), "") << cache;
  }
}

#endif

// A pool of the caller's own, with room for `limit` bytes.
struct Pool {
  Allocator allocator() {
    return {.allocate = [this](std::int64_t nbytes) -> void* {
              asked.push_back(nbytes);
              if (total + nbytes > limit) return nullptr;
              total += nbytes;
              return std::aligned_alloc(256, static_cast<std::size_t>(nbytes));
            },
            .free =
                [this](void* data, std::int64_t nbytes) {
                  total -= nbytes;
                  std::free(data);
                }};
  }
  std::int64_t limit, total = 0;
  std::vector<std::int64_t> asked = {};
};

using Asked = std::vector<std::int64_t>;

// Fewer than kMaxReserved would give back by itself.
TEST(Memory, ASystemThatHasNoneIsAskedAgainOnceKeptBlocksAreGivenBack) {
  Pool pool{.limit = 10 * 1024};
  {
    Memory memory({.allocator = pool.allocator()});
    std::byte* used = memory.allocate(1024, Category::kWorkspace);
    std::byte* kept[] = {memory.allocate(512, Category::kActivation),
                         memory.allocate(1024, Category::kActivation)};
    memory.free(kept[0], 512, Category::kActivation);
    memory.free(kept[1], 1024, Category::kActivation);
    EXPECT_EQ(pool.total, 2560) << "kept";
    pool.asked.clear();
    std::byte* large = memory.allocate(8 * 1024, Category::kGradient);
    EXPECT_EQ(pool.asked, (Asked{8192, 8192})) << "twice";
    EXPECT_EQ(pool.total, 9 * 1024);
    EXPECT_EQ(memory.stats().reserved_nbytes, 9 * 1024);
    EXPECT_EQ(memory.stats().total_nbytes, 9 * 1024);
    EXPECT_EQ(memory.stats().num_reservations, 4) << "what was had";
    // What is gone is not handed out: of both sizes a new one.
    pool.asked.clear();
    std::byte* again = memory.allocate(512, Category::kActivation);
    EXPECT_EQ(pool.asked, Asked{512});
    // Nothing is kept: asked twice in vain, and the books are as they were.
    pool.asked.clear();
    const MemoryStats before = memory.stats();
    EXPECT_TRUE(tessera::testing::has(
        tessera::testing::error_of<DeviceError>(
            [&] { memory.allocate(1024, Category::kActivation, "h.3"); }),
        {"expected 1024 bytes for activation", "got none", "h.3", "9728 bytes in use"}));
    EXPECT_EQ(pool.asked, (Asked{1024, 1024}));
    EXPECT_EQ(memory.stats(), before);
    memory.free(used, 1024, Category::kWorkspace);
    memory.free(large, 8 * 1024, Category::kGradient);
    memory.free(again, 512, Category::kActivation);
    EXPECT_EQ(memory.stats().total_nbytes, 0);
  }
  EXPECT_EQ(pool.total, 0) << "all of it goes back in the end";
}

// The last one that was given back may still be in a cache.
TEST(Memory, OfKeptBlocksTheLastIsTakenFirst) {
  Memory memory;
  std::byte* blocks[] = {memory.allocate(512, Category::kActivation),
                         memory.allocate(512, Category::kActivation),
                         memory.allocate(512, Category::kActivation)};
  for (std::byte* block : {blocks[1], blocks[2], blocks[0]}) {
    memory.free(block, 512, Category::kActivation);
  }
  for (std::byte* block : {blocks[0], blocks[2], blocks[1]}) {
    EXPECT_EQ(memory.allocate(512, Category::kActivation), block);
  }
  for (std::byte* block : blocks) memory.free(block, 512, Category::kActivation);
}

// What is in use counts against the limit, and neither what is kept nor what a block is larger by.
TEST(Memory, ALimitIsOfWhatIsInUse) {
  Memory memory({.limit_nbytes = 1000});
  std::byte* a = memory.allocate(1000, Category::kActivation);
  const auto error = [&] {
    return tessera::testing::error_of<OutOfMemory>(
        [&] { memory.allocate(1, Category::kGradient, "g"); });
  };
  EXPECT_TRUE(tessera::testing::has(error(), {"within 1000 bytes", "1000 in use", "1 more", "g"}));
  memory.free(a, 1000, Category::kActivation);
  std::byte* b = memory.allocate(400, Category::kActivation);
  std::byte* c = memory.allocate(600, Category::kActivation);
  EXPECT_FALSE(error().empty());
  EXPECT_EQ(memory.stats().peak_total_nbytes, 1000);
  memory.free(b, 400, Category::kActivation);
  memory.free(c, 600, Category::kActivation);
  EXPECT_THROW(memory.allocate(1001, Category::kActivation), OutOfMemory);
}

TEST(Memory, PeaksOfBothAndTheCurrentValuesOfTheLater) {
  MemoryStats now{.total_nbytes = 5, .peak_total_nbytes = 10, .reserved_nbytes = 6};
  MemoryStats earlier{.total_nbytes = 7, .peak_total_nbytes = 20, .reserved_nbytes = 30};
  for (std::size_t c = 0; c < std::size_t{kNumCategories}; ++c) {
    const auto n = static_cast<std::int64_t>(c);
    now.current_nbytes[c] = n;
    now.peak_nbytes[c] = 10 + n;
    earlier.current_nbytes[c] = 100 + n;
    earlier.peak_nbytes[c] = 16 - n;  // larger below the fourth
  }
  const MemoryStats both = with_peaks_of(now, earlier);
  EXPECT_EQ(both.current_nbytes, now.current_nbytes);
  EXPECT_EQ(both.peak_nbytes, (std::array<std::int64_t, 7>{16, 15, 14, 13, 14, 15, 16}));
  EXPECT_EQ(both.total_nbytes, 5);
  EXPECT_EQ(both.peak_total_nbytes, 20);
  EXPECT_EQ(both.reserved_nbytes, 6);
  EXPECT_EQ(with_peaks_of(earlier, now).peak_total_nbytes, 20);
}

TEST(Memory, PoisonFillsNewAndFreedBlocks) {
  Memory memory({.poison = true});
  EXPECT_TRUE(memory.poisons());
  EXPECT_FALSE(Memory().poisons());
  auto is_poison = [](const std::byte* data, std::int64_t nbytes) {
    return std::all_of(data, data + nbytes, [](std::byte b) { return b == std::byte{0xFF}; });
  };
  std::byte* data = memory.allocate(1000, Category::kGradient);
  EXPECT_TRUE(is_poison(data, 1000));
  std::memset(data, 0, 1000);
  memory.free(data, 1000, Category::kGradient);
  std::byte* again = memory.allocate(1000, Category::kGradient);
  ASSERT_EQ(data, again);
  EXPECT_TRUE(is_poison(again, 1000));
  memory.free(again, 1000, Category::kGradient);
}

TEST(Memory, CopiesShareTheBooks) {
  const Memory memory, copy = memory, other;
  EXPECT_EQ(memory, copy);
  EXPECT_FALSE(memory == other);
  const auto buffer = Buffer::create(copy, "b", 10, Category::kWorkspace);
  EXPECT_EQ(memory.stats().total_nbytes, 10);
  EXPECT_EQ(other.stats().total_nbytes, 0);
}

TEST(Memory, SerialsAreNeverReused) {
  const Memory memory;
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 100; ++i) {
    const auto buffer = Buffer::create(memory, "b", 8, Category::kWorkspace);
    EXPECT_TRUE(seen.insert(buffer->serial()).second);
  }
}

TEST(Memory, ThreadsLoseNoByte) {
  Memory memory({.poison = true});
  constexpr int kThreads = 8, kRounds = 200;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([memory, t]() mutable {
        std::mt19937 random(static_cast<unsigned>(t));
        struct Held {
          std::byte* data;
          std::int64_t nbytes;
          Category category;
        };
        std::vector<Held> held;
        for (int i = 0; i < kRounds; ++i) {
          const auto nbytes = static_cast<std::int64_t>(random() % 5000);
          const auto category = static_cast<Category>(random() % kNumCategories);
          held.push_back({memory.allocate(nbytes, category), nbytes, category});
          std::memset(held.back().data, t, static_cast<std::size_t>(nbytes));
          if (held.size() < 5) continue;
          const std::size_t k = random() % held.size();
          for (std::int64_t b = 0; b < held[k].nbytes; ++b) {
            ASSERT_EQ(held[k].data[b], static_cast<std::byte>(t)) << "two owners of one block";
          }
          memory.free(held[k].data, held[k].nbytes, held[k].category);
          held.erase(held.begin() + static_cast<std::ptrdiff_t>(k));
        }
        for (const Held& h : held) memory.free(h.data, h.nbytes, h.category);
      });
    }
  }
  const MemoryStats stats = memory.stats();
  EXPECT_EQ(stats.total_nbytes, 0);
  for (const std::int64_t n : stats.current_nbytes) EXPECT_EQ(n, 0);
  EXPECT_GT(stats.peak_total_nbytes, 0);
}

}  // namespace
}  // namespace tessera::engine

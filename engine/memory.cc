#include "engine/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "engine/error.h"

namespace tessera::engine {
namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

// Blocks come in few sizes so that a freed one fits the next request of about its size.
std::int64_t block_nbytes(std::int64_t nbytes) {
  const std::int64_t grain = nbytes < (1 << 16) ? 256 : nbytes < kHugePage ? 4096 : 1 << 16;
  return std::max<std::int64_t>((nbytes + grain - 1) / grain * grain, 256);
}

std::byte* system_allocate(std::int64_t nbytes) {
  const bool huge = nbytes >= kHugePage;
  const std::int64_t alignment = huge ? kHugePage : 256;
  const std::int64_t padded = (nbytes + alignment - 1) / alignment * alignment;
  void* data =
      std::aligned_alloc(static_cast<std::size_t>(alignment), static_cast<std::size_t>(padded));
  if (data != nullptr && huge) {
    // Advice only: without huge pages the block still works.
    (void)madvise(data, static_cast<std::size_t>(padded), MADV_HUGEPAGE);
  }
  return static_cast<std::byte*>(data);
}

}  // namespace

std::string_view name_of(Category category) {
  static constexpr std::array<std::string_view, kNumCategories> kNames = {
      "parameter_shard", "gathered_parameter", "gradient", "optimizer",
      "activation",      "communication",      "workspace"};
  return kNames[static_cast<std::size_t>(category)];
}

struct Memory::State {
  explicit State(MemoryOptions o) : options(o) {}
  ~State() {
    for (auto& [nbytes, blocks] : free_blocks)
      for (std::byte* block : blocks) std::free(block);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const MemoryOptions options;
  mutable std::mutex mutex;
  MemoryStats stats;
  std::map<std::int64_t, std::vector<std::byte*>> free_blocks;
  std::uint64_t next_serial = 1;

  // A kept block of exactly this size, or null.
  std::byte* take(std::int64_t nbytes) {
    const auto it = free_blocks.find(nbytes);
    if (it == free_blocks.end()) return nullptr;
    std::byte* block = it->second.back();
    it->second.pop_back();
    if (it->second.empty()) free_blocks.erase(it);
    return block;
  }

  void release_cache() {
    for (auto& [nbytes, blocks] : free_blocks) {
      for (std::byte* block : blocks) std::free(block);
      stats.reserved_nbytes -= nbytes * static_cast<std::int64_t>(blocks.size());
    }
    free_blocks.clear();
  }
};

Memory::Memory(MemoryOptions options) : state_(std::make_shared<State>(options)) {}

std::byte* Memory::allocate(std::int64_t nbytes, Category category) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const std::int64_t block = block_nbytes(nbytes);
  std::byte* data = s.take(block);
  if (data == nullptr) {
    data = system_allocate(block);
    if (data == nullptr) {  // give the kept blocks back and try once more
      s.release_cache();
      data = system_allocate(block);
    }
    require<DeviceError>(data != nullptr,
                         "[memory] expected {} bytes for {}, got none ({} bytes in use)", nbytes,
                         name_of(category), s.stats.total_nbytes);
    s.stats.reserved_nbytes += block;
  }
  const auto c = static_cast<std::size_t>(category);
  MemoryStats& stats = s.stats;
  stats.current_nbytes[c] += nbytes;
  stats.total_nbytes += nbytes;
  stats.peak_nbytes[c] = std::max(stats.peak_nbytes[c], stats.current_nbytes[c]);
  stats.peak_total_nbytes = std::max(stats.peak_total_nbytes, stats.total_nbytes);
  if (s.options.poison) poison(data, nbytes);
  return data;
}

void Memory::free(std::byte* data, std::int64_t nbytes, Category category) noexcept {
  State& s = *state_;
  if (s.options.poison) poison(data, nbytes);
  const std::lock_guard lock(s.mutex);
  s.stats.current_nbytes[static_cast<std::size_t>(category)] -= nbytes;
  s.stats.total_nbytes -= nbytes;
  const std::int64_t block = block_nbytes(nbytes);
  if (s.options.cache) {
    s.free_blocks[block].push_back(data);
  } else {
    s.stats.reserved_nbytes -= block;
    std::free(data);
  }
}

MemoryStats Memory::stats() const {
  const std::lock_guard lock(state_->mutex);
  return state_->stats;
}

void Memory::reset_peaks() {
  const std::lock_guard lock(state_->mutex);
  state_->stats.peak_nbytes = state_->stats.current_nbytes;
  state_->stats.peak_total_nbytes = state_->stats.total_nbytes;
}

bool Memory::poisons() const { return state_->options.poison; }

std::uint64_t Memory::next_serial() {
  const std::lock_guard lock(state_->mutex);
  return state_->next_serial++;
}

void poison(std::byte* data, std::int64_t nbytes) {
  std::memset(data, 0xFF, static_cast<std::size_t>(nbytes));
}

}  // namespace tessera::engine

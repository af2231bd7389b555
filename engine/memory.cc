#include "engine/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "engine/cuda.h"
#include "engine/error.h"
#include "engine/live_buffers.h"
#include "engine/memory_listener.h"
#include "engine/out_of_memory.h"

namespace tessera::engine {
namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

// Blocks come in few sizes so that a freed one fits the next request of about its size.
std::int64_t block_nbytes(std::int64_t nbytes) {
  const std::int64_t grain = nbytes < (1 << 16) ? 256 : nbytes < kHugePage ? 4096 : 1 << 16;
  return std::max<std::int64_t>((nbytes + grain - 1) / grain * grain, 256);
}

// Addresses without memory: to read or write there ends the process.
std::byte* reserve_addresses(std::int64_t nbytes) {
  void* data = ::mmap(nullptr, static_cast<std::size_t>(nbytes), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

std::byte* system_allocate(const Device& device, std::int64_t nbytes) {
  if (device.is_meta) return reserve_addresses(nbytes);
  if constexpr (kCudaBuilt) {
    if (device.kind != DeviceKind::kCpu) return cuda::allocate(device, nbytes);
  }
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

void system_free(const Device& device, std::byte* data, std::int64_t nbytes) noexcept {
  if (device.is_meta) {
    (void)::munmap(data, static_cast<std::size_t>(nbytes));
    return;
  }
  if constexpr (kCudaBuilt) {
    if (device.kind != DeviceKind::kCpu) return cuda::deallocate(device, data);
  }
  std::free(data);
}

}  // namespace

std::string_view name_of(Category category) {
  static constexpr std::array<std::string_view, kNumCategories> kNames = {
      "parameter_shard", "gathered_parameter", "gradient", "optimizer",
      "activation",      "communication",      "workspace"};
  return kNames[static_cast<std::size_t>(category)];
}

MemoryStats with_peaks_of(MemoryStats now, const MemoryStats& earlier) {
  for (std::size_t i = 0; i < now.peak_nbytes.size(); ++i) {
    now.peak_nbytes[i] = std::max(now.peak_nbytes[i], earlier.peak_nbytes[i]);
  }
  now.peak_total_nbytes = std::max(now.peak_total_nbytes, earlier.peak_total_nbytes);
  return now;
}

// What a graph has. Dies with the state at the latest; the state is locked for all of it.
class Memory::Owned {
 public:
  explicit Owned(std::shared_ptr<State> state) : state_(std::move(state)) {}
  ~Owned();
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

 private:
  friend class Memory;
  struct Peaks {
    std::array<std::int64_t, kNumCategories> nbytes{};
    std::int64_t total_nbytes = 0;

    static Peaks of(const MemoryStats& now) { return {now.current_nbytes, now.total_nbytes}; }
    void raise(const MemoryStats& now) {
      for (std::size_t c = 0; c < nbytes.size(); ++c) {
        nbytes[c] = std::max(nbytes[c], now.current_nbytes[c]);
      }
      total_nbytes = std::max(total_nbytes, now.total_nbytes);
    }
  };
  struct Block {
    std::int64_t nbytes;  // of the whole
    std::int64_t used_nbytes = 0;
    Category category{};
    bool is_used = true;
  };

  std::shared_ptr<State> state_;
  std::map<std::byte*, Block> blocks_;
  Peaks before_, peaks_;
};

struct Memory::State {
  State(MemoryOptions o, const Device& d, std::optional<Stream> h, bool pinned = false)
      : options(std::move(o)), device(d), home(std::move(h)), is_pinned(pinned) {
    require(!options.allocator.allocate == !options.allocator.free,
            "[memory] expected an allocator with both of its functions, or none");
  }
  ~State() { release_cache(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const MemoryOptions options;
  const Device device;
  const std::optional<Stream> home;
  const bool is_pinned;
  mutable std::mutex mutex;
  MemoryStats stats;
  struct Kept {
    std::byte* data;
    std::uint64_t since;  // counts blocks given back
  };
  // Blocks of one size. `kept` has room for all of them, so that giving one back needs no memory.
  struct Blocks {
    std::vector<Kept> kept;  // the longest kept first
    std::size_t count = 0;   // those in use included
  };
  std::map<std::int64_t, Blocks> blocks_of_size;
  std::int64_t kept_nbytes = 0, peak_used_nbytes = 0;  // whole blocks
  std::uint64_t num_kept = 0;                          // ever
  std::uint64_t next_serial = 1;
  std::shared_ptr<Owned> owner;        // of what is handed out now; null: nobody's
  std::map<std::byte*, Owned*> owned;  // blocks that are out of the books
  const std::unique_ptr<LiveBuffers> live_buffers =
      options.check_saved ? std::make_unique<LiveBuffers>() : nullptr;

  // A new block, or null. Throws bad_alloc without room for the books.
  std::byte* make(Blocks& blocks, std::int64_t nbytes) {
    if (blocks.kept.capacity() <= blocks.count) blocks.kept.reserve(2 * blocks.count + 1);
    const Allocator& own = options.allocator;
    std::byte* data = own.allocate ? static_cast<std::byte*>(own.allocate(nbytes))
                                   : system_allocate(device, nbytes);
    if (data == nullptr) return nullptr;
    ++blocks.count;
    ++stats.num_reservations;
    stats.reserved_nbytes += nbytes;
    return data;
  }

  void keep(Blocks& blocks, std::int64_t nbytes, std::byte* data) {
    blocks.kept.push_back({data, num_kept++});
    kept_nbytes += nbytes;
  }

  // There are some of this size: the one that was given back last, as it may be in a cache.
  std::byte* take(Blocks& blocks, std::int64_t nbytes) {
    std::byte* data = blocks.kept.back().data;
    blocks.kept.pop_back();
    kept_nbytes -= nbytes;
    return data;
  }

  void count_used() {
    peak_used_nbytes = std::max(peak_used_nbytes, stats.reserved_nbytes - kept_nbytes);
  }

  // Makes room for a block of `nbytes`, which no kept one serves; see the header.
  void shrink_cache(std::int64_t nbytes) {
    if (owner != nullptr) return;  // as in free()
    const std::int64_t used = stats.reserved_nbytes - kept_nbytes + nbytes;
    const auto most = static_cast<std::int64_t>(
        kMaxReserved * static_cast<double>(std::max(peak_used_nbytes, used)));
    while (kept_nbytes > 0 && stats.reserved_nbytes + nbytes > most) {
      auto oldest = blocks_of_size.end();
      for (auto it = blocks_of_size.begin(); it != blocks_of_size.end(); ++it) {
        if (it->second.kept.empty()) continue;
        if (oldest == blocks_of_size.end() ||
            it->second.kept.front().since < oldest->second.kept.front().since) {
          oldest = it;
        }
      }
      Blocks& blocks = oldest->second;
      std::byte* data = blocks.kept.front().data;
      blocks.kept.erase(blocks.kept.begin());
      kept_nbytes -= oldest->first;
      unmake(blocks, oldest->first, data);
    }
    // Sizes that are gone, but for the one that is asked for.
    std::erase_if(blocks_of_size,
                  [&](const auto& item) { return item.second.count == 0 && item.first != nbytes; });
  }

  void unmake(Blocks& blocks, std::int64_t nbytes, std::byte* data) {
    if (options.allocator.free) {
      if (home) home->synchronize_quietly();  // its owner may hand it to another stream at once
      options.allocator.free(data, nbytes);
    } else {
      system_free(device, data, nbytes);
    }
    --blocks.count;
    stats.reserved_nbytes -= nbytes;
  }

  void release_cache() {
    if (owner != nullptr) return;
    for (auto& [nbytes, blocks] : blocks_of_size) {
      while (!blocks.kept.empty()) unmake(blocks, nbytes, take(blocks, nbytes));
    }
  }
};

Memory::Memory(MemoryOptions options)
    : state_(std::make_shared<State>(std::move(options), Device{}, std::nullopt)) {}

Memory::Memory(const Stream& home, MemoryOptions options)
    : state_(std::make_shared<State>(
          std::move(options), home.device(),
          home.device().is_cuda() ? std::optional<Stream>(home) : std::nullopt)) {}

Memory Memory::pinned(const Stream& stream, MemoryOptions options) {
  const Device device = stream.device();
  if (!device.is_cuda() && !device.is_meta) return Memory(std::move(options));
  return Memory(std::make_shared<State>(
      std::move(options),
      Device{device.is_cuda() ? DeviceKind::kPinned : device.kind, device.index, device.is_meta},
      std::nullopt, /*pinned=*/true));
}

bool Memory::is_pinned() const { return state_->is_pinned; }
Device Memory::device() const { return state_->device; }
const std::optional<Stream>& Memory::home() const { return state_->home; }

std::byte* Memory::allocate(std::int64_t nbytes, Category category, std::string_view name) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const std::int64_t limit = s.options.limit_nbytes;
  require<OutOfMemory>(limit == 0 || nbytes <= limit - s.stats.total_nbytes,
                       "[memory] expected to stay within {} bytes on {}, got {} in use and {} more "
                       "asked for, {} ({})",
                       limit, to_string(s.device), s.stats.total_nbytes, nbytes, name_of(category),
                       name);
  const std::int64_t block = block_nbytes(nbytes);
  State::Blocks& blocks = s.blocks_of_size[block];
  std::byte* data = nullptr;
  if (!blocks.kept.empty()) {
    data = s.take(blocks, block);
  } else {
    s.shrink_cache(block);
    data = s.make(blocks, block);
    if (data == nullptr) {  // give the kept blocks back and try once more
      s.release_cache();
      data = s.make(blocks, block);
    }
    require<OutOfMemory>(data != nullptr,
                         "[memory] expected {} bytes for {} on {}, got none ({}{}{} bytes in use)",
                         nbytes, name_of(category), to_string(s.device), name,
                         name.empty() ? "" : ", ", s.stats.total_nbytes);
  }
  if (s.options.poison) {
    try {
      fill(data, kPoison, nbytes);
    } catch (...) {
      s.unmake(blocks, block, data);
      throw;
    }
  }
  s.count_used();
  const auto c = static_cast<std::size_t>(category);
  MemoryStats& stats = s.stats;
  stats.current_nbytes[c] += nbytes;
  stats.total_nbytes += nbytes;
  stats.peak_nbytes[c] = std::max(stats.peak_nbytes[c], stats.current_nbytes[c]);
  stats.peak_total_nbytes = std::max(stats.peak_total_nbytes, stats.total_nbytes);
  if (s.owner != nullptr) {
    s.owner->peaks_.raise(stats);
    s.owner->blocks_[data] = {.nbytes = block, .used_nbytes = nbytes, .category = category};
  }
  if (s.options.listener != nullptr) s.options.listener->on_allocate(data, nbytes, category, name);
  return data;
}

void Memory::free(std::byte* data, std::int64_t nbytes, Category category) noexcept {
  State& s = *state_;
  if (s.options.poison) {
    try {
      fill(data, kPoison, nbytes);
    } catch (...) {  // the device failed, and whoever waits for it is told
    }
  }
  const std::lock_guard lock(s.mutex);
  if (const auto owned = s.owned.find(data); owned != s.owned.end()) {
    owned->second->blocks_.find(data)->second.is_used = false;
    return;
  }
  if (s.options.listener != nullptr) s.options.listener->on_free(data);
  s.stats.current_nbytes[static_cast<std::size_t>(category)] -= nbytes;
  s.stats.total_nbytes -= nbytes;
  if (s.owner != nullptr) {
    const auto mine = s.owner->blocks_.find(data);
    if (mine != s.owner->blocks_.end()) mine->second.is_used = false;
  }
  const std::int64_t block = block_nbytes(nbytes);
  State::Blocks& blocks = s.blocks_of_size.find(block)->second;
  if (s.options.cache || s.owner != nullptr) {  // CUDA frees nothing while a stream captures
    s.keep(blocks, block, data);
  } else {
    s.unmake(blocks, block, data);
  }
}

void Memory::begin_owning() {
  auto owner = std::make_shared<Owned>(state_);
  const std::lock_guard lock(state_->mutex);
  owner->before_ = owner->peaks_ = Owned::Peaks::of(state_->stats);
  state_->owner = std::move(owner);
}

std::shared_ptr<Memory::Owned> Memory::end_owning() {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const std::shared_ptr<Owned> owner = std::exchange(s.owner, nullptr);
  for (auto& [data, block] : owner->blocks_) {
    s.owned.emplace(data, owner.get());
    if (block.is_used) {
      s.stats.current_nbytes[static_cast<std::size_t>(block.category)] -= block.used_nbytes;
      s.stats.total_nbytes -= block.used_nbytes;
    } else {
      s.kept_nbytes -= block.nbytes;
      std::erase_if(s.blocks_of_size.find(block.nbytes)->second.kept,
                    [mine = data](const State::Kept& kept) { return kept.data == mine; });
    }
  }
  return owner;
}

// A block that is still in use has left the books: it goes when its user lets go.
Memory::Owned::~Owned() {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  for (const auto& [data, block] : blocks_) {
    s.owned.erase(data);
    if (!block.is_used) {
      s.keep(s.blocks_of_size.find(block.nbytes)->second, block.nbytes, data);
      continue;
    }
    s.stats.current_nbytes[static_cast<std::size_t>(block.category)] += block.used_nbytes;
    s.stats.total_nbytes += block.used_nbytes;
  }
}

void Memory::count_again(const Owned& owned) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  MemoryStats& stats = s.stats;
  const std::int64_t more = owned.peaks_.total_nbytes - owned.before_.total_nbytes;
  const std::int64_t limit = s.options.limit_nbytes;
  require<OutOfMemory>(limit == 0 || more <= limit - stats.total_nbytes,
                       "[memory] expected to stay within {} bytes on {}, got {} in use and {} more "
                       "of a graph",
                       limit, to_string(s.device), stats.total_nbytes, more);
  for (std::size_t c = 0; c < stats.peak_nbytes.size(); ++c) {
    stats.peak_nbytes[c] =
        std::max(stats.peak_nbytes[c],
                 stats.current_nbytes[c] + owned.peaks_.nbytes[c] - owned.before_.nbytes[c]);
  }
  stats.peak_total_nbytes = std::max(stats.peak_total_nbytes, stats.total_nbytes + more);
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
bool Memory::checks_saved() const { return state_->options.check_saved; }
LiveBuffers* Memory::live_buffers() const { return state_->live_buffers.get(); }

MemoryListener* Memory::listener() const { return state_->options.listener.get(); }

std::uint64_t Memory::next_serial() {
  const std::lock_guard lock(state_->mutex);
  return state_->next_serial++;
}

Event Memory::allocated() const {
  return state_->home ? state_->home->record("allocated") : Event();
}

void Memory::fill(std::byte* data, int byte, std::int64_t nbytes) const {
  if (state_->device.is_meta) return;
  if constexpr (kCudaBuilt) {
    if (state_->home) return cuda::fill(*state_->home, data, byte, nbytes);
  }
  std::memset(data, byte, static_cast<std::size_t>(nbytes));
}

}  // namespace tessera::engine

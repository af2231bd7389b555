// Compiled without ThreadSanitizer (see BUILD), as the rest of the scheduler.
#include "tests/emulator/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "tests/emulator/block.h"

namespace tessera::cuda_emulation {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Room for a block.
struct Slot {
  Block block;
  std::unique_ptr<void, Free> dynamic_shared;
  uint3 index{};      // of the block
  bool used = false;  // in this launch
};

// What one OS thread runs grids with.
struct Worker {
  std::vector<std::unique_ptr<Slot>> slots;
  Slot* current = nullptr;
  bool may_pause = false;
  int num_rests = 0;  // since something was written or a block began or ended
};

constinit thread_local Worker* worker = nullptr;

// No byte more than asked for, so that AddressSanitizer sees what goes beyond.
void* new_shared(std::size_t nbytes) {
  constexpr std::size_t kAlignment = 1024;
  void* memory = nullptr;
  if (nbytes > 0 && posix_memalign(&memory, kAlignment, nbytes) != 0) throw std::bad_alloc();
  return memory;
}

void poison_shared(const KernelSymbols& kernel, std::size_t dynamic_nbytes) {
  if (dynamic_nbytes > 0) std::memset(worker->current->dynamic_shared.get(), 0xFF, dynamic_nbytes);
  for (const ThreadLocal& variable : kernel.shared) {
    std::memset(variable.address(), 0xFF, variable.nbytes);
  }
  for (const ThreadLocal& variable : kernel.shared_of_functions) {
    std::memset(variable.address(), 0xFF, variable.nbytes);
  }
}

void shuffle(void* const (&lanes)[32], std::uint32_t group) {
  for (std::uint32_t rest = group; rest != 0; rest &= rest - 1) {
    auto* mine = static_cast<Exchange*>(lanes[std::countr_zero(rest)]);
    const auto* source = static_cast<const Exchange*>(lanes[mine->source % 32]);
    mine->out = source != nullptr ? source->in : ~std::uint64_t{0};
  }
}

void ballot(void* const (&lanes)[32], std::uint32_t group) {
  std::uint32_t votes = 0;
  for (std::uint32_t rest = group; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (static_cast<const Exchange*>(lanes[lane])->in != 0) votes |= 1u << lane;
  }
  for (std::uint32_t rest = group; rest != 0; rest &= rest - 1) {
    static_cast<Exchange*>(lanes[std::countr_zero(rest)])->out = votes;
  }
}

void gather(void* const (&lanes)[32], std::uint32_t group) {
  for (std::uint32_t rest = group; rest != 0; rest &= rest - 1) {
    auto* mine = static_cast<Gathered*>(lanes[std::countr_zero(rest)]);
    for (std::uint32_t others = group; others != 0; others &= others - 1) {
      const int lane = std::countr_zero(others);
      mine->all[lane] = static_cast<const Gathered*>(lanes[lane])->in;
    }
  }
}

constexpr std::size_t kMaxUnderWay = 4;
// More than there can be threads that wait in vain before one is asked whose wait is over.
constexpr int kMaxRests = 1 << 17;

// A launch under way.
class Launch {
 public:
  Launch(const KernelSymbols& kernel, const GridShape& shape, std::uint64_t seed,
         const std::function<void()>& body)
      : kernel_(kernel), shape_(shape), seed_(seed), body_(body) {
    blockDim = shape.block;
    gridDim = shape.grid;
    worker->may_pause = kernel.shared.empty();
    for (const auto& slot : worker->slots) slot->used = false;
    Block& first = free_slot().block;
    first.start_launch(shape.block, seed);
    if (!first.is_natural() && num_blocks_ > 1) {
      do stride_ = first.draw() % num_blocks_;
      while (std::gcd(stride_, num_blocks_) != 1);
      next_ = first.draw() % num_blocks_;
    }
  }

  void run() {
    while (num_begun_ < num_blocks_ || !paused_.empty()) {
      const bool can_begin = num_begun_ < num_blocks_ && paused_.size() < kMaxUnderWay;
      const std::size_t choice =
          paused_.empty() ? 0 : draw() % (paused_.size() + (can_begin ? 1 : 0));
      if (choice == paused_.size()) {
        begin(free_slot());
      } else {
        Slot& slot = *paused_[choice];
        paused_.erase(paused_.begin() + static_cast<std::ptrdiff_t>(choice));
        enter(slot);
        finish(slot, slot.block.resume());
      }
    }
    join_all();
  }

 private:
  void join_all() {
    for (const auto& slot : worker->slots)
      if (slot->used) slot->block.races().join();
  }

  std::uint64_t draw() {
    Block& first = worker->slots.front()->block;
    return first.is_natural() ? num_turns_++ : first.draw();
  }

  Slot& free_slot() {
    for (const auto& slot : worker->slots)
      if (std::ranges::find(paused_, slot.get()) == paused_.end()) return *slot;
    return *worker->slots.emplace_back(std::make_unique<Slot>());
  }

  void enter(Slot& slot) {
    worker->current = &slot;
    blockIdx = slot.index;
  }

  void begin(Slot& slot) {
    Block& block = slot.block;
    const bool owns_shared = shape_.shared_nbytes > 0 || !kernel_.shared.empty();
    const bool is_first = !slot.used;
    if (is_first) {
      slot.used = true;
      const auto at = static_cast<std::uint64_t>(&slot == worker->slots.front().get() ? 0 : 1);
      if (at != 0) block.start_launch(shape_.block, seed_ == 0 ? 0 : draw() | 1);
      slot.dynamic_shared.reset(new_shared(shape_.shared_nbytes));
      block.races().start(owns_shared ? std::min(RaceThreads::kCount, block.num_threads())
                                      : RaceThreads::kCount);
    }
    slot.index = {static_cast<unsigned>(next_ % shape_.grid.x),
                  static_cast<unsigned>(next_ / shape_.grid.x % shape_.grid.y),
                  static_cast<unsigned>(next_ / shape_.grid.x / shape_.grid.y)};
    next_ = (next_ + stride_) % num_blocks_;
    ++num_begun_;
    enter(slot);
    if (is_first || block.has_met() || owns_shared) {
      if (!is_first) block.races().join();
      poison_shared(kernel_, shape_.shared_nbytes);
      block.races().fork();
    }
    block.async_proxy().start(slot.dynamic_shared.get(), shape_.shared_nbytes, block.num_threads());
    worker->num_rests = 0;
    finish(slot, block.run(body_));
  }

  // What there is to do once the block has ended or paused.
  void finish(Slot& slot, const std::string& failure) {
    if (!failure.empty()) {
      join_all();
      for (const auto& other : worker->slots) other->block.forget_threads();
      throw std::runtime_error(
          fmt::format("kernel {}, block {}: {}", kernel_.name, text_of(slot.index), failure));
    }
    if (slot.block.has_paused()) {
      paused_.push_back(&slot);
    } else {
      worker->num_rests = 0;
    }
  }

  const KernelSymbols& kernel_;
  const GridShape& shape_;
  const std::uint64_t seed_;
  const std::function<void()>& body_;
  const std::uint64_t num_blocks_ = std::uint64_t{shape_.grid.x} * shape_.grid.y * shape_.grid.z;
  std::uint64_t stride_ = 1, next_ = 0, num_begun_ = 0, num_turns_ = 0;
  std::vector<Slot*> paused_;
};

}  // namespace

void run_grid(const KernelSymbols& kernel, const GridShape& shape, std::uint64_t seed,
              const std::function<void()>& thread_body) {
  thread_local Worker instance;
  worker = &instance;
  Launch(kernel, shape, seed, thread_body).run();
}

void* dynamic_shared_memory() { return worker->current->dynamic_shared.get(); }

int sync_block(const char* name, bool predicate, Place where) {
  return worker->current->block.sync(name, predicate, where);
}

void meet(const Collective& collective, std::uint32_t mask, void* mine, Place where) {
  worker->current->block.meet(collective, mask, mine, where);
}

void wait_for_others(Place where) {
  if (!worker->may_pause) fail_launch("waits for others with static shared memory", where);
  if (++worker->num_rests > kMaxRests) fail_launch("no block can go on: it waits in vain", where);
  worker->current->block.pause();
  worker->current->block.rest();
}

void let_overtake() {
  Block& block = worker->current->block;
  if (worker->may_pause && !block.is_natural() && block.draw() % 4 == 0) block.pause();
}

void note_progress() { worker->num_rests = 0; }

void fail_launch(const char* text, Place where) { worker->current->block.fail(text, where); }

void issue_copy(AsyncCopy copy, Place where) { worker->current->block.issue(copy, where); }
void commit_copies() { worker->current->block.commit(); }
std::optional<AsyncCopy> land_copy(int num_pending) {
  return worker->current->block.land(num_pending);
}

const Collective kSyncWarp{"__syncwarp", false, true, nullptr};
const Collective kShuffle{"__shfl_sync", false, false, shuffle};
const Collective kBallot{"__ballot_sync", false, false, ballot};
const Collective kGather{"__reduce_sync", false, false, gather};

}  // namespace tessera::cuda_emulation

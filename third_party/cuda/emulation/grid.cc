// Compiled without ThreadSanitizer (see BUILD), as the rest of the scheduler.
#include "third_party/cuda/emulation/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>

#include "third_party/cuda/emulation/block.h"

namespace tessera::cuda_emulation {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// What one OS thread runs grids with.
struct Worker {
  Block block;
  std::unique_ptr<void, Free> dynamic_shared;
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
  if (dynamic_nbytes > 0) std::memset(worker->dynamic_shared.get(), 0xFF, dynamic_nbytes);
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

}  // namespace

void run_grid(const KernelSymbols& kernel, const GridShape& shape, std::uint64_t seed,
              const std::function<void()>& thread_body) {
  thread_local Worker instance;
  worker = &instance;
  Block& block = instance.block;
  RaceThreads& races = block.races();
  block.start_launch(shape.block, seed);
  instance.dynamic_shared.reset(new_shared(shape.shared_nbytes));
  blockDim = shape.block;
  gridDim = shape.grid;
  const std::uint64_t num_blocks = std::uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  std::uint64_t stride = 1, index = 0;
  if (!block.is_natural() && num_blocks > 1) {
    do stride = block.draw() % num_blocks;
    while (std::gcd(stride, num_blocks) != 1);
    index = block.draw() % num_blocks;
  }
  const bool owns_shared = shape.shared_nbytes > 0 || !kernel.shared.empty();
  races.start(owns_shared ? std::min(RaceThreads::kCount, block.num_threads())
                          : RaceThreads::kCount);
  for (std::uint64_t i = 0; i < num_blocks; ++i, index = (index + stride) % num_blocks) {
    blockIdx = {static_cast<unsigned>(index % shape.grid.x),
                static_cast<unsigned>(index / shape.grid.x % shape.grid.y),
                static_cast<unsigned>(index / shape.grid.x / shape.grid.y)};
    if (i == 0 || block.has_met() || owns_shared) {
      if (i > 0) races.join();
      poison_shared(kernel, shape.shared_nbytes);
      races.fork();
    }
    const std::string failure = block.run(thread_body);
    if (failure.empty()) continue;
    races.join();
    block.forget_threads();
    throw std::runtime_error(
        fmt::format("kernel {}, block {}: {}", kernel.name, text_of(blockIdx), failure));
  }
  races.join();
}

void* dynamic_shared_memory() { return worker->dynamic_shared.get(); }

int sync_block(const char* name, bool predicate, Place where) {
  return worker->block.sync(name, predicate, where);
}

void meet(const Collective& collective, std::uint32_t mask, void* mine, Place where) {
  worker->block.meet(collective, mask, mine, where);
}

void fail_launch(const char* text, Place where) { worker->block.fail(text, where); }

void issue_copy(AsyncCopy copy) { worker->block.issue(copy); }
void commit_copies() { worker->block.commit(); }
std::optional<AsyncCopy> land_copy(int num_pending) { return worker->block.land(num_pending); }

const Collective kSyncWarp{"__syncwarp", false, true, nullptr};
const Collective kShuffle{"__shfl_sync", false, false, shuffle};
const Collective kBallot{"__ballot_sync", false, false, ballot};

}  // namespace tessera::cuda_emulation

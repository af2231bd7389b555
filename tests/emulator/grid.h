// The emulated device: runs the threads of a kernel as fibers of the calling thread.
//
// [Note: order of threads] Blocks run one after the other. The threads of a block run until they
// reach a barrier or the end; which runs next is drawn from the seed, for warps and for lanes, at
// the start and after every barrier, so that work which leans on an order without a barrier shows
// as a wrong result for some seed. Seed 0 is the natural order.
//
// [Note: blocks that wait] A thread that spins until another has written something calls
// __nanosleep in its loop, else it spins for ever. There other threads and other blocks go on: up
// to four blocks are under way, in an order that the seed draws, as on a GPU that has room for so
// many; so a block that waits for one that can only start when it has ended fails, as "no block can
// go on". load_acquire and store_release are places where other blocks may overtake, too. Kernels
// whose blocks pause so have dynamic shared memory alone: static variables are there once.
//
// [Note: races] Under ThreadSanitizer the threads of a block are fibers of its own kind, ordered by
// __syncthreads, __syncwarp, the start and the end of a launch and nothing else: shuffles and votes
// order no memory, as on the device. Threads share such fibers (32 a stream), so a race between two
// given threads may be missed, one between many is not. Blocks of one launch are
// unordered if their threads meet nowhere and there is no dynamic shared memory; else shared
// memory, which every block finds at the same address, orders them. Blocks under way together are
// unordered but for acquire and release.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "tests/emulator/symbols.h"

// The built-in variables of kernels, under the names CUDA gives them.
inline constinit thread_local uint3 threadIdx{};
inline constinit thread_local uint3 blockIdx{};
inline constinit thread_local dim3 blockDim{};
inline constinit thread_local dim3 gridDim{};
inline constexpr int warpSize = 32;

namespace tessera::cuda_emulation {

/// Runs `thread_body` once for every thread of the grid, on the calling thread. Throws
/// std::runtime_error naming kernel, block and thread if threads of a block meet at different
/// barriers, leave while others wait, misuse a warp function or throw; the rest of the grid is then
/// left out.
struct GridShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_nbytes = 0;  ///< dynamic, per block
};
void run_grid(const KernelSymbols& kernel, const GridShape& shape, std::uint64_t seed,
              const std::function<void()>& thread_body);

// What follows is for the threads of a running grid.

/// Where a kernel calls a function of the device.
struct Place {
  const char* file = nullptr;
  int line = 0;

  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// Index of the calling thread in its block, x fastest; its lane is the remainder by 32.
inline constinit thread_local unsigned current_thread = 0;
inline unsigned current_lane() { return current_thread % 32; }

/// Dynamic shared memory of the block, 1,024-byte aligned, all bits set when the block starts.
void* dynamic_shared_memory();

/// Waits for all threads of the block; returns how many of them passed a true predicate.
int sync_block(const char* name, bool predicate, Place where);

/// A function that lanes of a warp call together. `combine` runs once, when all have arrived, on
/// what each of `group` passed; it orders no memory of the kernel.
struct Collective {
  const char* name;
  bool whole_warp;     ///< all 32 lanes must take part
  bool orders_memory;  ///< a barrier for what the lanes read and write
  void (*combine)(void* const (&lanes)[32], std::uint32_t group);
};
void meet(const Collective& collective, std::uint32_t mask, void* mine, Place where);

/// For a thread that waits for what others write: lets them go on.
void wait_for_others(Place where);
/// Other blocks may overtake here, if the seed says so.
void let_overtake();
/// Something was written that others may wait for.
void note_progress();

/// Ends the running launch with an error that names kernel, block and thread.
[[noreturn]] void fail_launch(const char* text, Place where);

/// Ends it unless the address is a multiple of `nbytes`, as that of a wide access has to be.
inline void check_alignment(const void* address, std::size_t nbytes, Place where = Place::here()) {
  if (reinterpret_cast<std::uintptr_t>(address) % nbytes != 0) {
    fail_launch("a wide access to a misaligned address", where);
  }
}

/// A cp.async of the calling thread that has not landed.
struct AsyncCopy {
  void* shared;
  const void* global;  ///< null: zeros
};
void issue_copy(AsyncCopy copy, Place where);
void commit_copies();
/// Takes the oldest copy out of the queue, unless it belongs to the last `num_pending` groups;
/// kNoCopyPending takes those that are not committed, too.
inline constexpr int kNoCopyPending = -1;
std::optional<AsyncCopy> land_copy(int num_pending);

/// What a lane passes to the collectives below.
struct Exchange {
  std::uint64_t in = 0;
  unsigned source = 0;    ///< lane to read, for shuffles
  std::uint64_t out = 0;  ///< all bits set if the source takes no part
};
struct Gathered {
  std::uint64_t in = 0;
  std::uint64_t all[32] = {};  ///< `in` of each lane that takes part
};
extern const Collective kSyncWarp;
extern const Collective kShuffle;
extern const Collective kBallot;  ///< out: bit mask of the lanes with in != 0
extern const Collective kGather;  ///< of Gathered

}  // namespace tessera::cuda_emulation

// The threads of one block at a time, as fibers. Private to the emulated device.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/emulator/async_proxy.h"
#include "tests/emulator/fibers.h"
#include "tests/emulator/grid.h"
#include "tests/emulator/warpgroups.h"

namespace tessera::cuda_emulation {

std::string text_of(const uint3& index);

/// Runs blocks on one OS thread, one after the other, and keeps what the next can use. A block may
/// pause, and another Block of this thread run in the meantime.
class Block {
 public:
  static constexpr unsigned kLanes = 32;
  static constexpr unsigned kMaxThreads = 1024;

  Block() : fibers_(&Block::run_threads) {}

  /// Before the first block of a launch; seed 0 is the natural order.
  void start_launch(dim3 shape, std::uint64_t seed);
  /// Every thread of the block `blockIdx`, until the block ends or pauses; the text of what went
  /// wrong, or empty. After a failure the caller calls forget_threads().
  std::string run(const std::function<void()>& thread_body);
  bool has_paused() const { return has_paused_; }
  /// Goes on, with `blockIdx` as before, until the block ends or pauses again.
  std::string resume();
  void forget_threads();

  unsigned num_threads() const { return num_threads_; }
  /// Whether threads of the last block waited for each other.
  bool has_met() const { return has_met_; }
  bool is_natural() const { return natural_; }
  std::uint64_t draw();
  RaceThreads& races() { return races_; }
  AsyncProxy& async_proxy() { return async_proxy_; }
  Warpgroups& warpgroups() { return warpgroups_; }
  /// fn(), whose allocations are the emulation's and not the current thread's, and whose accesses
  /// to the threads' memory are no races: AsyncProxy and Warpgroups tell what is out of order.
  template <class F>
  void as_host(F&& fn) {
    races_.begin_unseen();
    fn();
    races_.end_unseen();
    races_.act_as(current().race_thread);
  }

  // For the current thread.
  int sync(const char* name, bool predicate, Place where);
  void meet(const Collective& collective, std::uint32_t mask, void* mine, Place where);
  /// Leaves the block until resume(), which goes on with this thread.
  void pause();
  /// Lets other threads of the block go on.
  void rest();
  [[noreturn]] void fail(const char* text, Place where);
  void issue(AsyncCopy copy, Place where);
  /// What is at `shared` is written, and may be an operand of a product.
  void note_operand(const void* shared, std::size_t nbytes, Place where);
  void commit();
  std::optional<AsyncCopy> land(int num_pending);

 private:
  // Visits the set bits of a mask in an order that the seed draws.
  struct Order {
    unsigned cursor = kLanes - 1;
    unsigned stride = 1;

    unsigned next(std::uint32_t mask) {
      do cursor = (cursor + stride) % kLanes;
      while ((mask >> cursor & 1u) == 0);
      return cursor;
    }
  };

  struct Warp {
    std::uint32_t ready = 0;
    std::uint32_t at_warp = 0;   // in meet()
    std::uint32_t at_block = 0;  // in sync()
    std::uint32_t gone = 0;      // returned, or beyond the block
    Order order;
  };

  struct Thread {
    struct Copy {
      AsyncCopy copy;
      int group;
    };

    uint3 index{};
    int fiber = -1;  // -1: not started
    unsigned race_thread = 0;
    // In meet():
    std::uint32_t mask = 0;
    const Collective* collective = nullptr;
    void* mine = nullptr;
    Place where;
    // Copies under way:
    std::vector<Copy> copies;
    std::size_t num_landed = 0;
    int num_committed = 0;
  };

  // An order of memory among the threads at a barrier. There are two, since a thread may be one
  // barrier ahead of another that has yet to acquire.
  struct MemoryOrder {
    char sides[2] = {};
    unsigned phase = 0;
  };

  static void run_threads();
  Order draw_order();
  void prepare();
  std::string result();
  bool pick();
  void enter(unsigned thread);
  void go_to_current();
  void suspend();
  void finish_thread();
  void complete(Warp& warp, std::uint32_t mask);
  [[noreturn]] void leave();
  void note(Place where, const std::string& text);
  void note_stuck();
  void note_exception(const char* what);
  Thread& current() { return threads_[current_thread]; }

  const std::function<void()>* body_ = nullptr;
  FiberPool fibers_;
  RaceThreads races_;
  AsyncProxy async_proxy_;
  Warpgroups warpgroups_;
  std::string failure_;  // empty: none

  bool natural_ = true;
  std::uint64_t random_ = 0;
  bool interleave_ = false;  // turn to another warp after every collective
  bool turn_ = false;

  dim3 shape_{0, 0, 0};
  unsigned num_threads_ = 0;
  unsigned num_warps_ = 0;
  unsigned num_gone_ = 0;
  bool has_met_ = false;
  bool has_paused_ = false;
  unsigned paused_thread_ = 0;
  std::vector<Thread> threads_;
  Warp warps_[kLanes];
  std::uint32_t ready_warps_ = 0;  // may include some that are not
  unsigned warp_ = 0;
  Order warp_order_;

  // The barrier of the block.
  unsigned num_arrived_ = 0;
  unsigned first_arrived_ = 0;
  const char* barrier_name_ = nullptr;
  Place barrier_where_;
  int num_true_[2] = {};
  MemoryOrder block_order_;
  MemoryOrder warp_orders_[kMaxThreads];  // by the first thread of the mask
};

/// The block whose threads the calling OS thread runs.
Block& running_block();

}  // namespace tessera::cuda_emulation

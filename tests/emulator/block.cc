// Compiled without ThreadSanitizer (see BUILD): what the scheduler does orders nothing in a kernel.
#include "tests/emulator/block.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace tessera::cuda_emulation {
namespace {

// The block whose threads the calling OS thread runs.
constinit thread_local Block* running = nullptr;

bool same_place(const Place& a, const Place& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string text_of(const Place& where) { return fmt::format("{}:{}", where.file, where.line); }

constexpr std::size_t kCopyNbytes = 16;  // of a cp.async

unsigned first_bit(std::uint32_t mask) { return static_cast<unsigned>(std::countr_zero(mask)); }

}  // namespace

Block& running_block() { return *running; }

std::string text_of(const uint3& index) {
  return fmt::format("({}, {}, {})", index.x, index.y, index.z);
}

std::uint64_t Block::draw() {
  std::uint64_t z = (random_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

Block::Order Block::draw_order() {
  if (natural_) return {};
  const std::uint64_t r = draw();
  return {static_cast<unsigned>(r % kLanes), static_cast<unsigned>(r >> 32) % kLanes | 1u};
}

void Block::start_launch(dim3 shape, std::uint64_t seed) {
  natural_ = seed == 0;
  random_ = seed;
  has_met_ = false;
  if (shape.x == shape_.x && shape.y == shape_.y && shape.z == shape_.z) return;
  shape_ = shape;
  num_threads_ = shape.x * shape.y * shape.z;
  num_warps_ = (num_threads_ + kLanes - 1) / kLanes;
  threads_.resize(num_threads_);
  unsigned i = 0;
  for (unsigned z = 0; z < shape.z; ++z) {
    for (unsigned y = 0; y < shape.y; ++y) {
      for (unsigned x = 0; x < shape.x; ++x) threads_[i++].index = {x, y, z};
    }
  }
}

void Block::prepare() {
  num_gone_ = 0;
  num_arrived_ = 0;
  has_met_ = false;
  turn_ = false;
  warpgroups_.start();
  interleave_ = !natural_ && draw() % 4 == 0;
  for (unsigned w = 0; w < num_warps_; ++w) {
    const unsigned lanes = std::min(kLanes, num_threads_ - w * kLanes);
    const std::uint32_t present = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    warps_[w] = {.ready = present, .gone = ~present, .order = draw_order()};
  }
  ready_warps_ = static_cast<std::uint32_t>((std::uint64_t{1} << num_warps_) - 1);
  warp_order_ = draw_order();
  warp_ = warp_order_.next(ready_warps_);
  const unsigned rotation = natural_ ? 0 : static_cast<unsigned>(draw() % RaceThreads::kCount);
  for (unsigned i = 0; i < num_threads_; ++i) {
    Thread& thread = threads_[i];
    thread.fiber = -1;
    thread.race_thread =
        RaceThreads::enabled() ? (i + rotation + 5 * (i / kLanes)) % races_.count() : 0;
    if (thread.num_committed == 0 && thread.copies.empty()) continue;
    thread.copies.clear();
    thread.num_landed = 0;
    thread.num_committed = 0;
  }
}

std::string Block::run(const std::function<void()>& thread_body) {
  running = this;
  body_ = &thread_body;
  prepare();
  current_thread = kMaxThreads;
  (void)pick();
  go_to_current();
  return result();
}

// What went wrong in a block that has ended or paused.
std::string Block::result() {
  if (failure_.empty() && !has_paused_) failure_ = warpgroups_.finish();
  return std::exchange(failure_, {});
}

void Block::pause() {
  paused_thread_ = current_thread;
  has_paused_ = true;
  current().fiber = fibers_.current();
  races_.act_as_host();
  fibers_.jump(FiberPool::kHost);
}

std::string Block::resume() {
  running = this;
  has_paused_ = false;
  enter(paused_thread_);
  go_to_current();
  return result();
}

void Block::rest() {
  warps_[warp_].ready |= 1u << current_lane();
  ready_warps_ |= 1u << warp_;
  turn_ = true;
  suspend();
}

void Block::forget_threads() {
  has_paused_ = false;
  fibers_.reset();
  races_.reset();
}

void Block::run_threads() {
  Block& self = *running;
  for (;;) {
    try {
      (*self.body_)();
    } catch (const std::exception& error) {
      self.note_exception(error.what());
    } catch (...) {
      self.note_exception("of a type that is not std::exception");
    }
    if (!self.failure_.empty()) self.leave();
    self.finish_thread();
  }
}

// Makes `thread` the current one, for the fiber that runs next.
void Block::enter(unsigned thread) {
  current_thread = thread;
  threadIdx = threads_[thread].index;
  races_.act_as(threads_[thread].race_thread);
}

// Chooses the next thread (current_thread is still the last one); false if none can run.
bool Block::pick() {
  if (warps_[warp_].ready == 0 || turn_) {
    turn_ = false;
    do {
      if (warps_[warp_].ready == 0) ready_warps_ &= ~(1u << warp_);
      if (ready_warps_ == 0) return false;
      warp_ = warp_order_.next(ready_warps_);
    } while (warps_[warp_].ready == 0);
  }
  Warp& warp = warps_[warp_];
  const unsigned lane = warp.order.next(warp.ready);
  warp.ready &= ~(1u << lane);
  enter(warp_ * kLanes + lane);
  return true;
}

void Block::go_to_current() {
  const Thread& next = current();
  if (next.fiber >= 0) return fibers_.jump(next.fiber);
  races_.act_as_host();
  const int fiber = fibers_.take(next.race_thread);
  races_.act_as(next.race_thread);
  fibers_.jump(fiber);
}

// Leaves the current thread, which waits or is ready, until it is picked again.
void Block::suspend() {
  const unsigned before = current_thread;
  if (!pick()) {
    note_stuck();
    leave();
  }
  if (current_thread == before) return;
  threads_[before].fiber = fibers_.current();
  go_to_current();
}

// The current thread has returned. Comes back with another thread to run on this fiber.
void Block::finish_thread() {
  races_.act_as_host();
  Warp& warp = warps_[warp_];
  warp.gone |= 1u << current_lane();
  ++num_gone_;
  for (std::uint32_t rest = warp.at_warp; rest != 0; rest &= rest - 1) {
    const unsigned lane = first_bit(rest);
    if ((warp.at_warp >> lane & 1u) == 0) continue;  // went on with one before it
    const std::uint32_t mask = threads_[warp_ * kLanes + lane].mask;
    if ((mask & ~(warp.at_warp | warp.gone)) == 0) complete(warp, mask);
  }
  const unsigned race_thread = current().race_thread;
  if (!pick()) {
    if (num_gone_ != num_threads_) {
      note_stuck();
      leave();
    }
    fibers_.release_current();
    return fibers_.jump(FiberPool::kHost);
  }
  if (current().fiber < 0 && current().race_thread == race_thread) return;
  fibers_.release_current();
  go_to_current();
}

int Block::sync(const char* name, bool predicate, Place where) {
  if (num_arrived_ == 0) {
    barrier_where_ = where;
    barrier_name_ = name;
    first_arrived_ = current_thread;
    num_true_[block_order_.phase % 2] = 0;
  } else if (!same_place(where, barrier_where_)) {
    races_.join_host();
    note(where, fmt::format("reached {} while thread {} waits in another, {} at {}", name,
                            text_of(threads_[first_arrived_].index), barrier_name_,
                            text_of(barrier_where_)));
    leave();
  }
  has_met_ = true;
  const unsigned side = block_order_.phase % 2;
  num_true_[side] += predicate ? 1 : 0;
  RaceThreads::release(&block_order_.sides[side]);
  warps_[warp_].at_block |= 1u << current_lane();
  if (++num_arrived_ == num_threads_) {
    num_arrived_ = 0;
    ++block_order_.phase;
    async_proxy_.pass_barrier();
    for (unsigned w = 0; w < num_warps_; ++w) {
      warps_[w].ready = std::exchange(warps_[w].at_block, 0);
      warps_[w].order = draw_order();
    }
    warp_order_ = draw_order();
    ready_warps_ = static_cast<std::uint32_t>((std::uint64_t{1} << num_warps_) - 1);
    turn_ = true;
  }
  suspend();
  RaceThreads::acquire(&block_order_.sides[side]);
  return num_true_[side];
}

void Block::meet(const Collective& collective, std::uint32_t mask, void* mine, Place where) {
  const std::uint32_t bit = 1u << current_lane();
  if ((mask & bit) == 0) {
    races_.join_host();
    note(where, fmt::format("{} with a mask that leaves the lane out", collective.name));
    leave();
  }
  has_met_ = true;
  Thread& me = current();
  me.mask = mask;
  me.collective = &collective;
  me.mine = mine;
  me.where = where;
  MemoryOrder& order = warp_orders_[warp_ * kLanes + first_bit(mask)];
  char* const side = &order.sides[order.phase % 2];
  if (collective.orders_memory) RaceThreads::release(side);
  Warp& warp = warps_[warp_];
  warp.at_warp |= bit;
  if ((mask & ~(warp.at_warp | warp.gone)) == 0) complete(warp, mask);
  suspend();
  if (collective.orders_memory) RaceThreads::acquire(side);
}

// All lanes of the mask that still run are in meet(): lets them go.
void Block::complete(Warp& warp, std::uint32_t mask) {
  const auto index = static_cast<unsigned>(&warp - warps_);
  const std::uint32_t group = mask & warp.at_warp;
  const Thread& first = threads_[index * kLanes + first_bit(group)];
  if (first.collective->whole_warp && group != ~0u) {
    races_.act_as(current().race_thread);  // it may have returned
    races_.join_host();
    failure_ = fmt::format("{} at {} needs all 32 lanes, but some are missing (thread {} waits)",
                           first.collective->name, text_of(first.where), text_of(first.index));
    leave();
  }
  void* lanes[kLanes] = {};
  for (std::uint32_t rest = group; rest != 0; rest &= rest - 1) {
    const unsigned lane = first_bit(rest);
    const Thread& thread = threads_[index * kLanes + lane];
    if (thread.mask != mask || thread.collective != first.collective ||
        !same_place(thread.where, first.where)) {
      races_.join_host();
      failure_ = fmt::format(
          "threads {} and {} of one mask are in different warp functions or masks: {} at {} with "
          "{:08x} and {} at {} with {:08x}",
          text_of(first.index), text_of(thread.index), first.collective->name, text_of(first.where),
          first.mask, thread.collective->name, text_of(thread.where), thread.mask);
      leave();
    }
    lanes[lane] = thread.mine;
  }
  if (first.collective->combine != nullptr) first.collective->combine(lanes, group);
  ++warp_orders_[index * kLanes + first_bit(mask)].phase;
  warp.at_warp &= ~group;
  warp.ready |= group;
  warp.order = draw_order();
  ready_warps_ |= 1u << index;
  turn_ = interleave_;
}

// Ends the block; `failure_` says why. The fiber is not resumed.
void Block::leave() {
  races_.act_as_host();
  fibers_.jump(FiberPool::kHost);
  std::abort();
}

void Block::note(Place where, const std::string& text) {
  failure_ = fmt::format("thread {} at {}: {}", text_of(current().index), text_of(where), text);
}

void Block::note_exception(const char* what) {
  races_.join_host();
  failure_ = fmt::format("thread {} threw an exception: {}", text_of(current().index), what);
}

void Block::note_stuck() {
  races_.join_host();
  failure_ = "no thread can go on";
  if (num_arrived_ > 0) {
    failure_ += fmt::format("; {} wait in {} at {}, thread {} first", num_arrived_, barrier_name_,
                            text_of(barrier_where_), text_of(threads_[first_arrived_].index));
  }
  std::vector<Place> seen;
  const Thread* gone = nullptr;
  for (unsigned i = 0; i < num_threads_; ++i) {
    const Warp& warp = warps_[i / kLanes];
    const Thread& thread = threads_[i];
    if ((warp.gone >> i % kLanes & 1u) != 0 && gone == nullptr) gone = &thread;
    const auto is_known = [&](const auto& where) { return same_place(where, thread.where); };
    if ((warp.at_warp >> i % kLanes & 1u) == 0 || std::ranges::any_of(seen, is_known)) continue;
    seen.push_back(thread.where);
    failure_ += fmt::format("; thread {} waits in {} at {} with mask {:08x}", text_of(thread.index),
                            thread.collective->name, text_of(thread.where), thread.mask);
  }
  if (gone != nullptr) {
    failure_ += fmt::format("; {} have left the kernel, among them thread {}", num_gone_,
                            text_of(gone->index));
  }
}

void Block::fail(const char* text, Place where) {
  races_.join_host();
  note(where, text);
  leave();
}

void Block::note_operand(const void* shared, std::size_t nbytes, Place where) {
  if (!async_proxy_.note_write(shared, nbytes, current_thread))
    fail("writes shared memory that a wgmma has read since the last barrier", where);
}

void Block::issue(AsyncCopy copy, Place where) {
  note_operand(copy.shared, kCopyNbytes, where);
  races_.act_as_host();
  current().copies.push_back({copy, current().num_committed});
  races_.act_as(current().race_thread);
}

void Block::commit() { ++current().num_committed; }

std::optional<AsyncCopy> Block::land(int num_pending) {
  Thread& me = current();
  if (me.num_landed == me.copies.size()) {
    me.copies.clear();
    me.num_landed = 0;
    return std::nullopt;
  }
  const Thread::Copy& oldest = me.copies[me.num_landed];
  if (num_pending != kNoCopyPending && oldest.group + num_pending >= me.num_committed) {
    return std::nullopt;
  }
  ++me.num_landed;
  (void)async_proxy_.note_write(oldest.copy.shared, kCopyNbytes, current_thread);
  return oldest.copy;
}

}  // namespace tessera::cuda_emulation

// In which order units are gathered. The tape records the order of forward, so the order of
// backward is known before backward starts: prefetching follows a plan, never a guess. The first
// forward follows the declared order; later ones the order recorded before.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/stream.h"

namespace tessera::shard {

class Unit;

class Schedule {
 public:
  /// `depth`: how many units ahead of the one at work are gathered.
  explicit Schedule(int depth) : depth_(depth) {}
  /// Units other than the root, in declared order.
  void declare(std::vector<Unit*> order);

  void begin_micro_step();
  /// `unit` starts a forward visit: gather it, wait for it, prefetch what comes next.
  void enter_forward(Unit& unit, const engine::Stream& compute);
  /// `unit` ended a forward visit; returns whether to keep it unsharded: its backward is next.
  bool leave_forward(Unit& unit, bool will_backward);
  void enter_backward(Unit& unit, const engine::Stream& compute);

 private:
  void close_pending(const Unit& entering, const engine::Stream& compute);

  int depth_;
  std::vector<Unit*> order_;  // planned forward visits, root left out
  std::size_t position_ = 0;  // next planned visit
  std::vector<Unit*> log_;    // forward visits whose backward is to come
  Unit* pending_ = nullptr;   // last entered unit: its visit may still be open
  bool in_backward_ = false;
};

}  // namespace tessera::shard

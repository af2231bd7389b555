// Sharding without the tape: for whoever has gradients from elsewhere, such as another framework or
// code by hand. The same units, schedule and strategies; the caller says what a tape would see.
//
//   Raw raw(fsdp);
//   fsdp.begin_step();
//   for (Block* b : blocks) {
//     raw.gather(*b, Raw::For::kForward);  // parameters: b->parameters[i]->value.raw()
//     ... compute ...
//     raw.release(*b);
//   }
//   for (Block* b : blocks backwards) {
//     raw.gather(*b, Raw::For::kBackward);
//     ... write raw.grad(p) for each parameter ...
//     raw.grad_ready(*b);
//   }
//   raw.step(optimizer, lr, max_norm);
//
// With Memory({.allocator = ...}) all of it, but for what the host reads of a norm, lies in memory
// of the caller's own.
#pragma once

#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/optimizer/optimizer.h"

namespace tessera::shard {

class Raw {
 public:
  enum class For { kForward, kBackward, kEvaluation };

  /// `fsdp` outlives this.
  explicit Raw(Fsdp& fsdp) : fsdp_(fsdp), tape_(fsdp.memory(), fsdp.compute()) {}

  /// Before computing with the parameters of `block`, which is one of the wrapped: work that the
  /// compute stream is given from here on may read them, and on an inline stream the caller may.
  /// The next units are gathered ahead. Forward comes before backward, in any order of blocks; a
  /// block that ran several times has as many backwards; the root's, if there is one, is around all
  /// others. Throws InvalidArgument for a block that is not wrapped, and out of order.
  void gather(const engine::Block& block, For what);
  /// After forward or evaluation.
  void release(const engine::Block& block);
  /// In backward: where the gradient of `p` goes, and whether it is to be added to what is there or
  /// assigned as a whole. Call once before each writing. Undefined for a frozen parameter; one that
  /// is never asked for has a gradient of zero.
  engine::GradTarget grad(engine::Parameter& p) { return tape_.grad_target(p); }
  /// After backward, in the place of release(): what this pass of the block contributes is
  /// written. Its unit is reduced when all of its passes are done.
  void grad_ready(const engine::Block& block);
  /// Fsdp::finish_step() and the update, clipped to `max_norm` unless that is 0.
  GradNorm step(Optimizer& optimizer, double lr, double max_norm = 0);

 private:
  engine::RegionHooks& hooks_of(const engine::Block& block) const;
  bool is_root(const engine::Block& block) const;

  Fsdp& fsdp_;
  engine::Tape tape_;  // records nothing; the hooks ask it for stream, pass and uses
};

}  // namespace tessera::shard

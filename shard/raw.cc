#include "shard/raw.h"

#include "engine/error.h"

namespace tessera::shard {

using engine::Block;

engine::RegionHooks& Raw::hooks_of(const Block& block) const {
  engine::require(block.hooks != nullptr, "[raw] expected a wrapped block, got '{}'", block.name);
  return *block.hooks;
}

void Raw::gather(const Block& block, For what) {
  engine::RegionHooks& hooks = hooks_of(block);
  switch (what) {
    case For::kForward:
      return hooks.before_forward(block, tape_);
    case For::kEvaluation:
      return tape_.no_grad([&] { hooks.before_forward(block, tape_); });
    case For::kBackward:
      hooks.before_backward(block, tape_);
      if (!is_root(block)) return;
      for (const Flat& flat : fsdp_.units().back()->flats()) {
        for (engine::Parameter* p : flat.parameters) tape_.use(*p);
      }
  }
}

// Other blocks end inside the root's backward, so by their ends alone its uses would seem done.
bool Raw::is_root(const Block& block) const {
  const Unit& last = *fsdp_.units().back();
  return last.is_root() && last.blocks().front() == &block;
}

void Raw::release(const Block& block) {
  hooks_of(block).after_forward(block, tape_, /*has_ops=*/true);
}

void Raw::grad_ready(const Block& block) {
  if (is_root(block)) tape_.clear();
  hooks_of(block).after_backward(block, tape_);
}

GradNorm Raw::step(Optimizer& optimizer, double lr, double max_norm) {
  GradNorm norm = fsdp_.finish_step();
  optimizer.step(lr, norm, max_norm);
  return norm;
}

}  // namespace tessera::shard

// One step of several optimizers of one Fsdp, each of parameters of its own.
//
//   const auto is_matrix = [](const Parameter& p) { return p.shape.rank() == 2; };
//   SpectralSign matrices(fsdp, 0.95, is_matrix);
//   AdamW rest(fsdp, {.updates = [=](const Parameter& p) { return !is_matrix(p); }});
//   ... forward and backward ...
//   step_together({{&matrices, 0.02}, {&rest, 3e-4}}, fsdp.finish_step(), /*max_norm=*/1);
//
// Bits are those that each optimizer has alone, so they are the same for every strategy and number
// of ranks as its own are. Checkpoints keep all: {{&fsdp, {&matrices, &rest}}} (CheckpointPart).
//
// Each optimizer has states as large as all of a unit in which it updates anything, of none of a
// unit that it leaves alone: give matrices blocks of their own where that memory counts.
#pragma once

#include <vector>

#include "shard/optimizer/optimizer.h"

namespace tessera::shard {

/// An optimizer, and its learning rate in a step.
struct OptimizerStep {
  Optimizer* optimizer;
  double lr;
};

// As Optimizer::step() of each, with one norm of all gradients. Throw what that throws, and
// InvalidArgument naming a trainable parameter that none of them updates, or two; if they are not
// of one Fsdp; and, of several, if anything is offloaded, as they would write to the same staging.

void step_together(const std::vector<OptimizerStep>& steps, const GradNorm& norm, double max_norm);
void step_together(const std::vector<OptimizerStep>& steps, const JointNorm& norm, double max_norm);
void step_together(const std::vector<OptimizerStep>& steps, ClipFactor clip = {});

}  // namespace tessera::shard

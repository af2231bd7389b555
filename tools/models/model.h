// What training asks of a model: blocks to wrap, a loss over a batch, names in a checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tape.h"

namespace tessera::tools {

/// What one forward depends on besides parameters and batch.
struct Pass {
  bool recompute = false;
  bool training = true;           ///< dropout is active
  std::uint64_t seed = 0;         ///< of dropout
  std::int64_t first_sample = 0;  ///< global number of the first sample: picks its dropout masks
};

class Model {
 public:
  virtual ~Model() = default;

  /// In the order in which forward uses them; with root() what shard::Fsdp wraps.
  virtual std::vector<engine::Block*> blocks() = 0;
  /// The block whose region encloses all others; null: none.
  virtual engine::Block* root() { return nullptr; }
  /// Mean loss over a batch, f32 scalar. The model says which tensors a batch holds; throws
  /// InvalidArgument for others.
  virtual engine::Tensor loss(engine::Tape& tape, const std::vector<engine::Tensor>& batch,
                              const Pass& pass) = 0;
  /// What files call `p`, one of the model's own.
  virtual std::string checkpoint_name(const engine::Parameter& p) const { return p.name; }
};

}  // namespace tessera::tools

// What one rank contributes to a checkpoint: the elements that its optimizers own, and of what
// several ranks have all of, a part.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/ema.h"
#include "shard/fsdp.h"
#include "shard/optimizer/optimizer.h"
#include "shard/split_tensor.h"

namespace tessera::shard {

/// The optimizers of an Fsdp: none, one, or several that step_together(), in any order that stays.
class Optimizers : public std::vector<Optimizer*> {
 public:
  Optimizers() = default;
  Optimizers(Optimizer* one) {  // NOLINT(google-explicit-constructor): it is the usual
    if (one != nullptr) push_back(one);
  }
  Optimizers(std::initializer_list<Optimizer*> all) : vector(all) {}
};

/// What is saved and loaded together: the dense parameters of a model, say, and its experts, in
/// groups of their own. Two of one name, in groups that do not overlap, are copies of each other.
struct CheckpointPart {
  Fsdp* fsdp;
  Optimizers optimizers = {};
  Ema* ema = nullptr;  ///< of its parameters; null: none
};

/// Neighbouring elements of a tensor of a checkpoint.
struct CheckpointPiece {
  std::string kind, name;  ///< see CheckpointTensor
  int part = 0, num_parts = 1;
  std::vector<std::int64_t> shape;  ///< of the whole tensor
  std::int64_t begin = 0;           ///< first element
  SplitTensor values;
};

/// What of a flat lies as Flat::owned says: masters, the states of its optimizer, and averages.
struct OwnedTensor {
  std::string kind;
  SplitTensor values;
  const Optimizer* optimizer = nullptr;  ///< of a state

  /// Whether it has anything of `p`, a parameter of the flat.
  bool has(const engine::Parameter& p) const { return !optimizer || optimizer->updates(p); }
};
std::vector<OwnedTensor> owned_tensors(const Flat& flat, const CheckpointPart& part);

/// The pieces of this rank. Masters and states are the engine's own, not copies. Between steps.
/// Throws InvalidArgument for two buffers of one name.
std::vector<CheckpointPiece> pieces_of(std::span<const CheckpointPart> parts);

/// A copy of pieces in page-locked memory of the host, made while the next step runs.
class Snapshot {
 public:
  explicit Snapshot(const engine::Stream& compute);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Copies `pieces` after what compute was told so far, and makes them those of the copies;
  /// values must stay as they are until taken(). Memory is kept for the next time. If it throws,
  /// nothing reads values any more.
  void take(std::vector<CheckpointPiece>& pieces);
  const engine::Event& taken() const { return taken_; }
  std::int64_t nbytes() const { return memory_.stats().total_nbytes; }

 private:
  void copy_beside(std::vector<CheckpointPiece>& pieces);

  engine::Stream compute_, stream_;
  engine::Memory memory_;
  engine::Tensor arena_;
  engine::Event taken_;
};

}  // namespace tessera::shard

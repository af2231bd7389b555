// What training asks of a model: blocks to wrap, a loss over a batch.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/tape.h"

namespace tessera::tools {

class KeyValueCache;  // key_value_cache.h

/// Which blocks keep no activations, and run their forward again in backward: the first so many. By
/// the time backward has come to them, what the others keep is gone.
struct Recompute {
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

  std::int64_t blocks = 0;

  template <std::same_as<bool> Bool = bool>  // no number turns into `all`
  // NOLINTNEXTLINE(google-explicit-constructor): `true` is one
  constexpr Recompute(Bool all = false) : blocks(all ? kAll : 0) {}
  static constexpr Recompute first(std::int64_t blocks) {
    Recompute result;
    result.blocks = blocks;
    return result;
  }

  constexpr bool operator()(std::int64_t block) const { return block < blocks; }
  bool operator==(const Recompute&) const = default;
  /// "false", "true" or the number.
  std::string str() const {
    return blocks == 0 ? "false" : blocks == kAll ? "true" : std::to_string(blocks);
  }
};

/// What one forward depends on besides parameters and batch.
struct Pass {
  Recompute recompute = false;
  bool training = true;           ///< dropout is active
  std::uint64_t seed = 0;         ///< of dropout
  std::int64_t first_sample = 0;  ///< global number of the first sample: picks its dropout masks
  /// (1) i64 on a GPU, added to first_sample when kernels run: of a step that is captured.
  /// Undefined: nothing is.
  engine::Tensor samples_before = {};
  /// The loss is the sum over targets that are not masked, for a mean over more than the batch.
  bool is_sum = false;
  /// (B, T) i32, where tokens stand in the documents that share a row, each from 0; undefined: a
  /// row is one document. A loss takes them from its batch.
  engine::Tensor positions = {};
  /// Whose tokens come before those of the batch; null: none do.
  KeyValueCache* cache = nullptr;
};

class Model {
 public:
  virtual ~Model() = default;

  /// In the order in which forward uses them; with root() what shard::Fsdp wraps.
  virtual std::vector<engine::Block*> blocks() = 0;
  /// The block whose region encloses all others; null: none.
  virtual engine::Block* root() { return nullptr; }
  /// Loss over a batch, f32 scalar: the mean, or where a LanguageModel is asked for it the sum. The
  /// model says which tensors a batch holds; throws InvalidArgument for others.
  virtual engine::Tensor loss(engine::Tape& tape, const std::vector<engine::Tensor>& batch,
                              const Pass& pass) = 0;
};

/// Of all blocks, and then of the root.
inline std::vector<engine::Parameter*> parameters_of(Model& model) {
  std::vector<engine::Parameter*> all;
  std::vector<engine::Block*> blocks = model.blocks();
  if (model.root() != nullptr) blocks.push_back(model.root());
  for (const engine::Block* block : blocks) {
    all.insert(all.end(), block->parameters.begin(), block->parameters.end());
  }
  return all;
}

}  // namespace tessera::tools

// Parameters and blocks: what a model owns. Where a parameter's value and gradient live is decided
// by whoever wraps the block (shard::Fsdp), or by materialize() for a model that stands alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/init.h"
#include "engine/tensor.h"

namespace tessera::engine {

/// A member of this type keeps an object where it is: it can be neither copied nor moved.
class Immovable {
 public:
  Immovable() = default;
  Immovable(const Immovable&) = delete;
  Immovable& operator=(const Immovable&) = delete;
};

/// A trainable tensor. Blocks, ops and optimizers keep its address: what holds parameters is built
/// in place, as by std::deque::emplace_back(). It must not die while a tape has entries.
struct Parameter {
  std::string name;  ///< fully qualified, unique in the model: "h.0.attn.c_attn.weight"
  Shape shape;
  Init init = {};
  bool trainable = true;

  Tensor value = {};  ///< f32 or bf16; readable while its buffer is resident
  Tensor grad = {};   ///< f32 or bf16, not necessarily the dtype of `value`; undefined if frozen

  /// Set by the tape's first write in a pass; the owner of `grad` clears it. While it is false the
  /// next write assigns, so nothing has to be zeroed first.
  bool grad_written = false;

  [[no_unique_address]] Immovable immovable = {};
};

/// Parameters that are used together, e.g. one transformer layer: the unit of wrapping. Fsdp and
/// tapes keep its address, so it does not move, either.
struct Block {
  std::string name;
  std::vector<Parameter*> parameters = {};
  class RegionHooks* hooks = nullptr;  ///< set by the wrapper; null: parameters are always there
  /// What is no parameter and yet part of the model, such as running statistics that forward
  /// writes. Errors name them as their memory is named.
  std::vector<Tensor> buffers = {};

  [[no_unique_address]] Immovable immovable = {};
};

/// Gives `parameters` memory of their own, on any device, and initialises them: for models that are
/// not sharded. Throws InvalidArgument unless `dtype` and `grad_dtype` are f32 or bf16.
void materialize(const std::vector<Parameter*>& parameters, const Memory& memory,
                 std::uint64_t seed, DType dtype = DType::kF32, DType grad_dtype = DType::kF32);

}  // namespace tessera::engine

// What happens at the borders of a tape's regions: who shards a model is called there, and who
// looks at values is told of them.
#pragma once

#include <cstddef>
#include <string_view>

#include "engine/parameter.h"
#include "engine/tensor.h"

namespace tessera::engine {

class Tape;

/// What a forward is for.
enum class Pass {
  kRecorded,    ///< a backward will follow
  kDeferred,    ///< inside a recomputed region, whose backward will run this forward again
  kUnrecorded,  ///< evaluation
};

/// What happens at the border of a region of `tape`, whose stream computes. Implemented by
/// shard::Schedule; the tape knows no more.
class RegionHooks {
 public:
  virtual ~RegionHooks() = default;
  /// On return the block's parameters are resident. Tape::pass() says what the forward is for.
  virtual void before_forward(const Block& block, const Tape& tape) = 0;
  /// `has_ops`: something was recorded since before_forward(), so backward has work there. In
  /// backward the hooks fire either way.
  virtual void after_forward(const Block& block, const Tape& tape, bool has_ops) = 0;
  /// On return parameters are resident and the gradient views of trainable ones are writable.
  virtual void before_backward(const Block& block, const Tape& tape) = 0;
  /// Every gradient that this pass of the region contributes has been written.
  virtual void after_backward(const Block& block, const Tape& tape) = 0;
};

/// Told of what crosses the borders of regions, for whoever looks at values. By the thread that
/// launches, once what computes the tensor is launched: on a GPU read it after the tape's stream.
class BorderListener {
 public:
  virtual ~BorderListener() = default;
  /// Output `index` of a region that is to have a backward. `phase`: "forward" or, inside a region
  /// that is recomputed, "recompute".
  virtual void on_output(const Block& block, std::size_t index, const Tensor& output,
                         std::string_view phase) = 0;
  /// The complete gradient of that output, of its shape, before the region's backward uses it.
  virtual void on_output_gradient(const Block& block, std::size_t index,
                                  const Tensor& gradient) = 0;
};

}  // namespace tessera::engine

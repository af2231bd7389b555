// Sums the gradients of one flat over ranks and micro-steps. What a person hands in through
// FsdpOptions::reducer is a communication hook: it decides what is sent, and how.
//
//   all_reduce                          every rank keeps the whole sum           ddp, zero1
//   reduce_scatter                      each rank keeps its shard of it          zero2, zero3
//   reduce_scatter, then across         each replica keeps all shards            hsdp and hybrids
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/memory.h"
#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/layout.h"
#include "shard/mesh.h"
#include "shard/options.h"

namespace tessera::shard {

/// What a reducer is made for. Lives as long as the reducer.
struct ReducerContext {
  std::string name;                            ///< of the unit
  std::vector<engine::Parameter*> parameters;  ///< in the order of `layout`
  const Layout& layout;                        ///< of the whole gradient
  Range range;                                 ///< the part of the sum that this rank keeps
  Place place;                                 ///< over which ranks the parts are cut
  const Mesh& mesh;                            ///< groups for the stream: mesh.reduce()
  Precision precision;
  engine::Memory memory;
  engine::Stream stream;  ///< reductions are work of this stream
  /// In the reduction dtype, at least as large as the gradient, for the use of one reduce() at a
  /// time; undefined if that is the dtype of gradients.
  engine::Tensor staging;
};

class Reducer {
 public:
  virtual ~Reducer() = default;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// A new step: the sum starts anew with the next reduce().
  virtual void begin_step() = 0;
  /// Adds `in`, the whole gradient of a micro-step (flat_numel, accumulation dtype), to the sum, as
  /// work of the stream behind `ready`. `is_last`: no further call in this step; there may be none
  /// for which it is set, where the last micro-step does not reach the unit. Every rank calls it as
  /// often. The caller keeps `in` as it is until an event that it records on the stream.
  virtual void reduce(const engine::Tensor& in, const engine::Event& ready, bool is_last) = 0;
  /// Behind all calls of a step that has some: enqueues what is left to do until sum() is final.
  virtual void finish() {}

  /// (range.numel) f32: the sum over ranks and micro-steps, not the mean.
  const engine::Tensor& sum() const { return sum_; }

 protected:
  /// Allocates the sum.
  explicit Reducer(const ReducerContext& context);

  engine::Tensor sum_;
};

/// The reducer of the strategies: chosen by where the sum is kept, and on groups that do not sum in
/// the order of ranks for speed.
std::unique_ptr<Reducer> make_reducer(const ReducerContext& context);

}  // namespace tessera::shard

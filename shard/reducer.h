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

/// What a reducer is made for. A reducer copies what it keeps of it; what it refers to lives as
/// long as the reducer.
struct ReducerContext {
  std::string name;                            ///< of the unit
  std::vector<engine::Parameter*> parameters;  ///< in the order of `layout`
  const Layout& layout;                        ///< of the whole gradient
  Range range;                                 ///< of `layout`: what of the sum this rank keeps
  Place place;                                 ///< over which ranks the parts are cut
  const Mesh& mesh;                            ///< groups for the stream: mesh.reduce(), whose
                                               ///< `world` is null for one rank
  Precision precision;
  engine::Memory memory;
  engine::Memory pinned;  ///< page-locked memory of the host; on the CPU plain memory
  engine::Stream stream;  ///< reductions are work of this stream
  engine::Tensor sum;     ///< (range.numel) f32: what Reducer::sum() is to be; of a reducer that
                          ///< another one uses that one's own
  /// In the reduction dtype, at least as large as the gradient, for the use of one reduce() at a
  /// time; undefined if that is the dtype of gradients.
  engine::Tensor staging;
  bool may_skip = false;  ///< NonFinite::kSkip: Reducer::end_step() says which steps count
};

class Reducer {
 public:
  virtual ~Reducer() = default;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// A new step: the sum starts again with the next reduce().
  virtual void begin_step() = 0;
  /// Adds `in`, the whole gradient of a micro-step (flat_numel, accumulation dtype), to the sum, as
  /// work of the stream after `ready`. `is_last`: no further call in this step; there may be none
  /// for which it is set, where the last micro-step does not reach the unit. Every rank calls it as
  /// often. The caller keeps `in` as it is until an event that it records on the stream.
  virtual void reduce(const engine::Tensor& in, const engine::Event& ready, bool is_last) = 0;
  /// Whether reduce(in) may be given a first gradient of a step that was computed where sum() lies,
  /// `in` and sum() being the same memory: so it must be of the sum's size and dtype.
  virtual bool takes_sum() const { return false; }
  /// Whether finish() has anything to do; with OffloadOptions::gradients the sum is moved for it.
  virtual bool has_more() const { return true; }
  /// Whether a gradient depends on what earlier steps left. Such a hook cannot be made again in
  /// mid-run, and gives a gradient to what no backward of a step reached.
  virtual bool remembers() const { return false; }
  /// After all calls of a step that has some: enqueues what is left to do until sum() is final.
  virtual void finish() {}
  /// Whether end_step() has anything to do: then a GPU's host waits for the norm of each step.
  virtual bool takes_back() const { return false; }
  /// With ReducerContext::may_skip, if one reducer takes_back(), once for each step, before the
  /// next and before what the reducer remembers is read: whether the step counts. If not, it was
  /// given up, or its update is skipped, and what is remembered is to be what it was before
  /// begin_step(). All ranks say the same.
  virtual void end_step(bool counts) { (void)counts; }

  /// (range.numel) f32: the sum over ranks and micro-steps, not the mean. Only work that reduce()
  /// and finish() enqueue may use it: with OffloadOptions::gradients it lies there only then.
  const engine::Tensor& sum() const { return sum_; }

 protected:
  explicit Reducer(const ReducerContext& context) : sum_(context.sum) {}

  engine::Tensor sum_;
};

/// The reducer of the strategies: chosen by where the sum is kept, and on groups that do not sum in
/// the order of ranks for speed.
std::unique_ptr<Reducer> make_reducer(const ReducerContext& context);

}  // namespace tessera::shard

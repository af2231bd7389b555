// What a person chooses about sharding. Switching strategy changes one value here, nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/dtype.h"
#include "engine/stream.h"
#include "shard/placement.h"
#include "shard/step_listener.h"

namespace tessera::engine {
class MemoryListener;
struct Parameter;
}  // namespace tessera::engine

namespace tessera::shard {

/// Three roundings, named separately. The running sum over ranks and micro-steps is always f32, and
/// so are the master parameters.
struct Precision {
  engine::DType param = engine::DType::kF32;       ///< what is gathered and computed with
  engine::DType reduce = engine::DType::kF32;      ///< a gradient on the wire, 1 rank included
  engine::DType accumulate = engine::DType::kF32;  ///< what backward accumulates into

  friend bool operator==(const Precision&, const Precision&) = default;
};

class Reducer;
struct ReducerContext;
/// Makes the reducer of one flat; see reducer.h.
using ReducerFactory = std::function<std::unique_ptr<Reducer>(const ReducerContext&)>;

/// What becomes of a parameter that no backward of a step reached, on any rank. One that some rank
/// reached has the gradient zero on the others: with kSkip and whole parameters (ddp, zero1, zero2,
/// hybrid_zero2) ranks may leave out whole units, otherwise all run the same ones.
enum class UnusedParameters {
  kZero,  ///< its gradient is zero: weight decay and momentum go on
  kSkip,  ///< it has none: the optimizer leaves it and its state alone
};

/// When the gathers ahead start in backward: before a unit's backward, during which they then run,
/// or after it, when its slot is free. PyTorch's BACKWARD_PRE and BACKWARD_POST.
enum class BackwardPrefetch { kPre, kPost };

/// What becomes of a step whose gradient is not finite, on all ranks of an Fsdp alike; of several
/// that train one model together, with joint_norm().
enum class NonFinite {
  kThrow,  ///< Fsdp::finish_step() throws; on a GPU GradNorm::value() does, and the optimizer,
           ///< given the norm, updates nothing
  kSkip,   ///< GradNorm::not_finite() says so, the optimizer, given the norm, updates nothing, and
           ///< hooks take back what the step made them remember
};

/// How much of what a rank keeps between uses lies in page-locked memory of the host instead of on
/// the device: fractions from 0 to 1 of the elements that it has of each unit, the last ones,
/// rounded to multiples of 128. Bits are those without. On the CPU this is memory of books of its
/// own, so that all but the speed can be seen.
struct OffloadOptions {
  /// The masters, and what is gathered from them unless other ranks own a part of it too. What is
  /// whole on every rank is computed with where it lies: without masters of its own (f32) it cannot
  /// be offloaded.
  double parameters = 0;
  /// The sums of gradients. What a pass with MicroStep::no_sync keeps stays on the device.
  double gradients = 0;
  /// The states of the optimizer, which are updated there by the host.
  double optimizer = 0;
  /// Of the host that update and cast, for each rank; at least 1.
  int threads = 1;

  bool any() const { return parameters > 0 || gradients > 0 || optimizer > 0; }
};

/// Whether OffloadOptions::parameters has anything to move: masters apart from what is computed
/// with or gathered from, or all of a part that is gathered.
inline bool can_offload_parameters(const Placement& placement, const Precision& precision) {
  return precision.param != engine::DType::kF32 ||
         (placement.parameters != Place::kWhole && placement.parameters == placement.optimizer);
}

struct FsdpOptions {
  Placement placement = {};
  /// How many units ahead are gathered; slots of gathered parameters = prefetch + 1. At least 0.
  int prefetch = 1;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
  /// How many reductions may be on their way while backward goes on; gradient slots =
  /// reductions_in_flight + 1. At least 0.
  int reductions_in_flight = 1;
  /// Neighbouring blocks are packed into one unit until it has this many parameters.
  std::int64_t unit_min_numel = 0;
  /// Where parameters are whole on every rank (ddp, zero1, zero2, hybrid_zero2) a unit is the
  /// bucket of a reduction. From the last block on, whose gradient is ready first, blocks are
  /// packed into one bucket until its gradient has this many bytes on the wire; a block that has
  /// more is a bucket of its own. 0: one bucket for each block, or as `unit_min_numel` says.
  std::int64_t bucket_nbytes = 0;
  /// Bytes of the bucket that is reduced first, so that reductions start early; at most
  /// `bucket_nbytes` counts.
  std::int64_t first_bucket_nbytes = std::int64_t{1} << 20;
  /// The blocks' buffers become those of rank 0 when they are wrapped and in each begin_step();
  /// after join() those of the first rank that has a batch. False: each rank keeps its own.
  bool broadcast_buffers = true;
  Precision precision = {};
  /// kSkip gathers one byte for each parameter in every step, and waits for them.
  UnusedParameters unused_parameters = UnusedParameters::kZero;
  NonFinite non_finite = NonFinite::kThrow;
  /// Each rank looks for what is not finite before it is reduced, so that errors name the rank too,
  /// and the micro-step that was reduced (of several with no_sync the last). Reads every gradient
  /// once more.
  bool check_gradients = false;
  OffloadOptions offload = {};
  /// Parameters that stay as they are, with memory and gradients of the caller's own: neither
  /// initialised nor cut, gathered, reduced or updated, and no part of the norm or of a checkpoint.
  std::function<bool(const engine::Parameter&)> ignores = {};
  /// How many ranks' batches the gradient is the mean over; 0: those of the group. For experts in a
  /// group of their own, which compute for all ranks: see docs/models.md.
  int mean_ranks = 0;
  std::uint64_t seed = 1;       ///< of the initial parameters
  ReducerFactory reducer = {};  ///< instead of make_reducer(): a communication hook
  /// What `reducer` is made with, in words that must be the same on every rank.
  std::string reducer_text = {};

  engine::LaunchListener* listener = nullptr;  ///< of the gather and the reduce stream
  std::uint64_t delay_seed = 0;                ///< random delays on both (tests)
  StepListener* step_listener = nullptr;       ///< must outlive the Fsdp; null: nobody listens
  /// Of Fsdp::host_memory(); see engine/memory_listener.h. Null: nobody.
  std::shared_ptr<engine::MemoryListener> host_memory_listener = nullptr;

  /// Of stream `number` besides compute, with random delays of its own.
  engine::StreamOptions stream_options(std::uint64_t number) const {
    return {.listener = listener, .delay_seed = delay_seed == 0 ? 0 : delay_seed + number};
  }
};

/// What is special about one forward-backward pass of a step.
struct MicroStep {
  /// Keep the gradients of this pass whole and unreduced; the next pass adds to them. Faster, with
  /// an order of sums of its own. Not for the last pass of a step.
  bool no_sync = false;
  /// Calls of Tape::backward() in this pass. A gradient is reduced once, after the last.
  int num_backwards = 1;
  /// How many terms this rank's loss of this pass is a sum of, such as targets that are not masked.
  /// Said in each pass of a step, by all ranks, the mean gradient of the step is that over the
  /// terms of all of them, with the bits of one rank that makes all of these passes; and 0 if there
  /// are no terms. Unsaid, it is the mean over passes and ranks, whatever they have.
  std::optional<std::int64_t> weight = {};
};

}  // namespace tessera::shard

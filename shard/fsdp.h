// Fully sharded data parallelism over a model's blocks.
//
//   Fsdp fsdp(world, memory, compute, {&block0, &block1}, &root, {.prefetch = 1});
//   AdamW optimizer(fsdp, {});
//   for (...) {
//     fsdp.begin_step();
//     Tensor loss = tape.region(root, [&] { ... tape.region(block0, ...) ... });
//     tape.backward(loss);
//     optimizer.step(lr, fsdp.finish_step(), /*max_norm=*/1);
//   }
//
// A step reads top-down through fsdp.cc, schedule.cc, unit.cc, parameter_store.cc and reducer.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/host_gather.h"
#include "comm/process_group.h"
#include "engine/tape.h"
#include "shard/early_update.h"
#include "shard/flat_user.h"
#include "shard/grad_norm.h"
#include "shard/options.h"
#include "shard/schedule.h"
#include "shard/slots.h"
#include "shard/unit.h"

namespace tessera::shard {

class Fsdp {
 public:
  /// Collective. Wraps `blocks` (in the order in which forward uses them; packed into units by
  /// `options.unit_min_numel` or `options.bucket_nbytes`, for good) and `root`, the block whose
  /// region encloses all others and that owns what no single block owns, e.g. tied embeddings; it
  /// may be null. Initialises the parameters from `options.seed`, and makes the blocks' buffers
  /// those of rank 0. Blocks, parameters, group and stream outlive this object.
  /// Other calls on `group` come from the thread that drives this, in one order on all ranks.
  ///
  /// Throws InvalidArgument for a parameter in two blocks, two parameters of one name, a wrapped
  /// block, memory of another device or stream than `compute`, options out of range, or ranks whose
  /// plans differ (naming the first difference).
  Fsdp(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& compute,
       const std::vector<engine::Block*>& blocks, engine::Block* root, FsdpOptions options);
  /// Unwraps the blocks. While an exception unwinds, aborts the group so that nobody waits.
  ~Fsdp();
  Fsdp(const Fsdp&) = delete;
  Fsdp& operator=(const Fsdp&) = delete;

  // A step. Calls out of order throw InvalidArgument saying which is expected.

  /// Starts a step of `num_micro_steps` forward-backward passes, and its first one. Collective if
  /// blocks have buffers: see FsdpOptions::broadcast_buffers. Throws InvalidArgument naming a
  /// parameter whose `trainable` was changed without a call of trainable_changed().
  void begin_step(int num_micro_steps = 1, const MicroStep& first = {});
  /// Starts the next pass of the step.
  void next_micro_step(const MicroStep& next = {});
  /// Waits until all gradients are reduced. Returns the norm of the mean gradient over ranks and
  /// micro-steps; the same bits for every strategy. On the CPU throws InvalidArgument naming a
  /// parameter whose gradient is not finite, on every rank alike, unless FsdpOptions::non_finite
  /// says to skip, and CommError if a collective failed; on a GPU nothing is waited for, and the
  /// norm throws when it is read. Compares what the ranks have called so far, see
  /// ProcessGroup::agree().
  GradNorm finish_step();
  /// Collective, between steps, where ranks may have different numbers of batches: says that this
  /// rank has one for the first `num_batches` micro-steps of the next step, and returns how many
  /// that step has: the largest number of any rank, 0 when all are done.
  ///
  ///   while (const int n = fsdp.join(batches.has_next() ? 1 : 0)) {
  ///     fsdp.begin_step(n);
  ///     if (batches.has_next()) tape.backward(loss(batches.next()));
  ///     optimizer.step(lr, fsdp.finish_step(), /*max_norm=*/1);
  ///   }
  ///
  /// In micro-steps that it has no batch for, a rank takes part by itself in what its last one with
  /// a batch did, see [Note: shadows]; all else must be the same on every rank. The mean gradient
  /// is that over the batches there are, as one process would have it. When it returns 0, buffers
  /// are those of the first rank that had a batch in the last step. Throws InvalidArgument, on
  /// every rank alike, if a rank that has not completed a micro-step yet has no batch for the next.
  int join(int num_batches);
  /// Gives the step up, on every rank alike: its gradients are forgotten. Throws InvalidArgument if
  /// Optimizer::step_in_backward() has updated some of the parameters.
  void cancel_step();
  /// Collective, between steps: calls `fn`, and all that its forwards inside tape.no_grad() use is
  /// gathered once, before it, and not by each of them: for generation, evaluation and other loops.
  /// In it forwards send nothing, so ranks may make different numbers of them; values are those of
  /// forwards without it. Meanwhile the parameters take the memory of a whole model in
  /// Precision::param; this is given back at the end, also if `fn` throws. What `fn` writes, as by
  /// load() or summon(), is renewed and gathered again, once, by the next forward or at the end,
  /// on every rank. Inside another keep_gathered() it calls `fn` and nothing else. Returns when the
  /// work of `fn` is done. Throws InvalidArgument inside a step or region; in `fn` a forward that
  /// is recorded, begin_step(), an update and trainable_changed() do.
  void keep_gathered(const std::function<void()>& fn);
  /// Captures step(), a whole one from begin_step() to its update by an optimizer's step(), without
  /// doing it, and returns what does it: to be called between steps, each time after
  /// Optimizer::repeat_step(). Batches, and all else that changes, come by device memory; see
  /// [Note: a step as a graph] and engine/cuda_graph.h. One step came before it as usual, so that
  /// everything is warm. The result dies before this object, and is of no use after
  /// trainable_changed(). Steps of the usual kind, evaluations and checkpoints go on between its
  /// calls. Throws InvalidArgument without a GPU, with several ranks, with what the host takes part
  /// in (offload, reducers of one's own, check_gradients, UnusedParameters::kSkip, join(),
  /// step_in_backward()) and with listeners.
  std::function<void()> capture_step(const std::function<void()>& step);
  /// What finish_step() would have returned, after a call of that result: the norm now.
  /// `captured`: what it returned in the capture, which itself cannot be read.
  GradNorm read_norm(const GradNorm& captured);
  /// Blocks until all collectives are done. Throws CommError if one failed.
  void synchronize() const;
  /// With NonFinite::kSkip, between steps: tells reducers that take steps back whether the last one
  /// counts, once, before what they remember is read (see Reducer::end_step()). On a GPU blocks
  /// until its norm is known.
  void settle_step() const;
  /// After finish_step(): gradient sums times this are the mean over ranks and micro-steps, after
  /// join() over batches, and with MicroStep::weight over terms.
  double mean_scale() const { return mean_scale_; }

  // Values by parameter.

  /// Collective: the whole f32 parameter, on every rank.
  std::vector<float> full_parameter(const engine::Parameter& p);
  /// Collective, between finish_step() and the optimizer: the whole mean gradient, on every rank.
  /// Throws InvalidArgument for a frozen parameter.
  std::vector<float> full_gradient(const engine::Parameter& p);
  /// Between finish_step() and the optimizer, with UnusedParameters::kSkip: whether the parameter
  /// has no gradient, as no rank's backward reached it. Throws InvalidArgument otherwise.
  bool is_unused(const engine::Parameter& p) const;
  /// Sets a parameter from its whole f32 value. Waits for nobody, and is called on every rank: each
  /// keeps its part. What is gathered or computed with is renewed by the next forward or step.
  /// Throws InvalidArgument if the size differs, and inside a step or region, where part of the
  /// computation would use the values before.
  void load(const engine::Parameter& p, std::span<const float> values);
  /// Elements of a parameter, to be written to `out`, which has as many.
  using ReadElements = std::function<void(Range elements, std::span<float> out)>;
  /// As load() of the whole value, of which `read` is asked for what this rank owns alone, piece by
  /// piece: for values that are in files. What it throws passes through, with some pieces set.
  void load_owned(const engine::Parameter& p, const ReadElements& read);
  /// Collective: sets a parameter from the whole f32 value that rank `root` has, as load() does;
  /// other ranks may give none.
  void load_from(int root, const engine::Parameter& p, std::span<const float> values);
  /// Collective: renews at once all that is gathered or computed with, for programs that write
  /// masters by their addresses (Flat::master), which nothing here sees. Throws as load().
  void parameters_changed();
  /// Collective, between steps, after the update: `trainable` of some parameters was changed, on
  /// all ranks alike. Cuts their units again, one after the other; values stay, and so does the
  /// optimizer's state of what is trainable before and after. What is frozen loses its state, and
  /// with parameters in bf16 its f32 master; what is no longer starts from a state of zeros, and
  /// from a master that is the bf16 value. Reducers of one's own are made again, and each rank
  /// needs a batch for the next step. Throws InvalidArgument if ranks differ, naming the parameter,
  /// inside a step or region, between step_in_backward() or join() and its step, and with a
  /// reducer that remembers earlier steps. If memory runs out in it, nothing but the end is left.
  void trainable_changed();
  /// Collective: makes tensors that are no parameters (running statistics) those of rank `root`.
  void broadcast(const std::vector<engine::Tensor>& buffers, int root = 0);
  /// What the blocks have as buffers now, in declared order, the root's last.
  std::vector<engine::Tensor> buffers() const;

  /// Where a parameter lies among the units. cut_values.h reads and writes what is there.
  Location location_of(const engine::Parameter& p) const;
  /// All parameters in name order.
  std::vector<engine::Parameter*> parameters() const;
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const FsdpOptions& options() const { return context_.options; }
  const Mesh& mesh() const { return context_.mesh; }
  const engine::Memory& memory() const { return context_.memory; }
  /// Page-locked memory of the host: what is offloaded. On the CPU plain memory.
  const engine::Memory& host_memory() const { return context_.pinned; }
  /// Null without any.
  const Offload* offload() const { return context_.offload.get(); }
  const engine::Stream& compute() const { return compute_; }
  /// Lines that all ranks agreed on, and their hash.
  const std::vector<std::string>& plan() const { return plan_; }
  std::uint64_t plan_hash() const;

 private:
  friend class CutValues;
  friend class Ema;
  friend class Optimizer;

  /// `user` is told when units are laid out again, until it is removed.
  void add_user(FlatUser& user) { users_.push_back(&user); }
  void remove_user(FlatUser& user) noexcept { std::erase(users_, &user); }
  /// All units in the order of updates: the root first, as the next forward needs it first, and its
  /// gather then runs while the others are updated.
  std::vector<Unit*> update_order() const;
  /// Collective: what all ranks together own of `flat`, (flat_numel) workspace, of which `owned` is
  /// this rank's part, laid out like Flat::master. One all_gather, or two where parts are cut over
  /// a grid of ranks, between what `stream` does before and after; none where this rank owns all,
  /// which is then the result.
  engine::Tensor gather(const Flat& flat, const engine::Tensor& owned, const engine::Stream& stream,
                        const std::string& label);
  /// `update` says how the gradients of the finished step are used, in words that must be the same
  /// on every rank. Throws InvalidArgument unless they are there and not used yet, and CommError if
  /// ranks differ. `skips`: they are not used, as those of another Fsdp are not finite (see
  /// JointNorm).
  void take_gradients(std::string_view update, bool skips);
  /// Instead of take_gradients(): the gradients of the step that begins next, as they get final.
  /// Throws InvalidArgument inside a step, for the second time before one, and with
  /// UnusedParameters::kSkip or NonFinite::kSkip, as only the end of a step shows what is unused or
  /// not finite; CommError if `update`, as in take_gradients(), differs.
  void take_gradients_early(std::string_view update, EarlyUpdate early);
  /// For an optimizer that dies: an early update of its own is not called any more, and what
  /// updates launched on other streams than compute is done. While an exception unwinds, aborts as
  /// ~Fsdp() does.
  void end_updates(const Optimizer& owner) noexcept;
  /// `stream` wrote the masters of `unit`, and what of them lies on the host is written as
  /// `on_host` says: renews the copies that are computed with, and of the root, which the next
  /// forward needs first, starts the gather.
  void updated(Unit& unit, const engine::Stream& stream,
               const std::vector<WrittenOnHost>& on_host = {});
  /// All units are updated: starts the first gathers of the next forward.
  void prefetch_forward() {
    if (!compute_.is_capturing()) schedule_.prefetch_first(compute_);
  }

  enum class Phase { kIdle, kStep, kFinished, kBroken };

  void create_units(const std::vector<engine::Block*>& blocks, engine::Block* root);
  void create_rings();
  void check_whole(std::string_view caller) const;
  void check_can_capture() const;
  void rest();
  void create_sum_slots();
  void create_checks();
  void recut(Unit& unit);
  void check_not_held(std::string_view caller) const;
  void check_can_train(std::string_view caller) const;
  void let_go(const std::vector<std::size_t>& ring_sizes);
  void wait_for_readers();
  void broadcast_buffers(int root);
  // Work of the gather stream, between what `stream` did before and does after.
  void within(const engine::Stream& stream, const std::function<void()>& enqueue);
  void end_micro_step();
  void begin_micro_step(const MicroStep& options);
  void check_weight(const MicroStep& options);
  void add_weight(std::int64_t weight, bool is_last);
  void settle_mean();
  // Every rank's values, rank by rank, between and after collectives of units.
  template <class T>
  std::vector<T> gather_to_host(const std::vector<T>& values, std::string_view label);
  void find_unused();
  void update_early(Unit& unit);
  void finish_early_update();
  bool gathers_later(const Unit& unit) const;
  bool updates_on_host() const;
  void gather_updated(Unit& unit);

  // An update during the backward at work.
  struct Early {
    EarlyUpdate update;
    std::set<const Unit*> updated = {};
  };

  // What join() was told and said.
  struct Joined {
    int num_batches = 0;      // of this rank
    int num_micro_steps = 0;  // the most of any rank
    std::int64_t total = 0;
    int first_rank = 0;  // of those that have a batch
  };

  comm::ProcessGroup& group_;
  engine::Stream compute_;
  UnitContext context_;
  std::vector<std::unique_ptr<SlotRing>> rings_;
  std::vector<SumSlot> sum_slots_;
  std::vector<std::unique_ptr<Unit>> units_;
  Schedule schedule_;
  std::vector<std::string> plan_;
  Phase phase_ = Phase::kIdle;
  int num_micro_steps_ = 0;
  int micro_step_ = 0;
  double mean_scale_ = 1;
  std::optional<std::int64_t> weight_;       // of this rank's passes so far; none: they have none
  std::optional<comm::HostGather> weights_;  // of all ranks, until mean_scale_ knows them
  std::optional<Joined> joined_;             // of the next step, or the one at work
  // A step of which reducers are still to be told whether it counts: if its norm is finite. None:
  // it has not come to its end, or was given up, or skipped for another Fsdp.
  struct Unsettled {
    std::optional<GradNorm> norm;
  };
  mutable std::optional<Unsettled> unsettled_;
  int last_joined_ = 0;  // Joined::first_rank of the last step
  // What a GPU may still write, whoever has let go of it.
  std::vector<GradNorm> norms_in_flight_;
  std::optional<Early> early_;
  std::optional<engine::Stream> update_;  // of early updates
  std::vector<FlatUser*> users_;
  std::string holder_;                      // of CutValues::hold()
  std::vector<engine::Event> values_read_;  // whom masters and states are kept for, as they are
  int num_exceptions_;
};

}  // namespace tessera::shard

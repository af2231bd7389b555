// Unit: parameters that are gathered, computed with and reduced together.
//
//   SHARDED --unshard--> UNSHARDED --reshard--> SHARDED
//
// Memory: the shard always; a parameter slot while unsharded; a gradient slot from before_backward
// until the gradient is reduced, or on a rank that is alone the place of its sum. Parameters are
// views into the slot that the gather writes, their gradients views into the slot that the
// reduction reads: nothing is copied in or out. A unit does what it is told; when is decided by the
// schedule.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "shard/flat.h"
#include "shard/gradient_check.h"
#include "shard/mesh.h"
#include "shard/offload.h"
#include "shard/options.h"
#include "shard/parameter_store.h"
#include "shard/reducer.h"
#include "shard/slots.h"

namespace tessera::shard {

/// What all units of one Fsdp share. Outlives them.
struct UnitContext {
  Mesh mesh;
  engine::Memory memory;
  engine::Memory pinned;  ///< page-locked memory of the host; plain on the CPU
  engine::Stream gather;  ///< gathers of parameters
  engine::Stream reduce;  ///< reductions of gradients
  FsdpOptions options;
  std::shared_ptr<GradientCheck> check = nullptr;  ///< if the options ask for it
  std::unique_ptr<Offload> offload = nullptr;      ///< if the options ask for it
  /// On a GPU that offloads sums: where their squares are added, before they leave, for
  /// reduce_norm(). Cleared before each step.
  engine::Tensor norm_words = {};
};

class Unit {
 public:
  /// Lays out the parameters of `blocks` and initialises this rank's part of them.
  Unit(UnitContext& context, std::vector<engine::Block*> blocks, bool is_root);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  bool is_root() const { return is_root_; }
  const std::vector<engine::Block*>& blocks() const { return blocks_; }
  const std::vector<Flat>& flats() const { return flats_; }
  /// The flat that has gradients and is updated; null if all parameters are frozen.
  const Flat* trainable() const {
    return flats_.empty() || !flats_.front().trainable ? nullptr : &flats_.front();
  }
  /// What a parameter slot holds: 0 if the parameters are whole on every rank.
  std::int64_t gathered_nbytes() const { return gathered_->nbytes(); }
  std::int64_t gradient_nbytes() const { return gradient_->nbytes(); }
  /// What the sum of gradients takes: 0 without trainable parameters.
  std::int64_t sum_nbytes() const;
  /// Where slots come from, and the staging of reductions; set before the first step, and again
  /// after tear_down(). `sum`: null if the sums of gradients are not offloaded. `first_parameter`:
  /// how many trainable ones earlier units have.
  void set_up(SlotRing* parameters, SlotRing* gradients, const engine::Tensor& reduce_staging,
              SumSlot* sum, std::int64_t first_parameter);

  /// Takes back what set_up() made; between steps, with nothing gathered.
  void tear_down();
  /// Whether some parameter's `trainable` is no longer that of its flat.
  bool is_cut_otherwise() const;
  /// Between tear_down() and set_up(): lays the parameters out again, uninitialised.
  void recut();

  // Parameters.

  bool unsharded() const { return gathered_->resident(); }
  /// Between acquire() and release().
  bool in_use() const { return use_ == Use::kNow; }
  /// Whether a gather ahead has a slot, and nothing that it reads is being updated.
  bool can_prefetch() const;
  /// Starts the gather, unless unsharded. `why` ends the collective's label.
  void unshard(const engine::Stream& compute, const char* why);
  /// Work of `compute` may use the parameters from here until release(). `why`: "forward" or
  /// "backward", for StepListener.
  void acquire(const engine::Stream& compute, const char* why);
  /// Makes `stream` wait for the last gather, whether it was for a use or not: after it nobody
  /// reads this rank's part.
  void wait_for_gather(const engine::Stream& stream) const;
  void release() {
    if (in_use()) use_ = Use::kBefore;
  }
  /// Whether the slot, once there is one, stays the unit's while others need slots.
  void set_kept(bool kept) { is_kept_ = kept; }
  /// Some parameters have the next step's values, others' owners perhaps not yet: until
  /// finish_step() acquire() throws InvalidArgument.
  void forbid_use() { updated_in_step_ = true; }
  /// Gives the slot back once `compute` has done what it was told so far. `keep`: with what the
  /// placement keeps after forward.
  void reshard(const engine::Stream& compute, bool keep = false);
  /// Masters of the trainable flat were written by `stream`, and what of them lies on the host as
  /// `on_host` says: renews this rank's part of the copies that are computed with, and gives
  /// gathered ones back. What was gathered is in use no more.
  void renew(const engine::Stream& stream, const std::vector<WrittenOnHost>& on_host);
  /// renew() of all masters, whichever were written.
  void renew_all(const engine::Stream& stream);
  /// To be called where masters are written: what is gathered or computed with is out of date until
  /// renew_stale().
  void mark_stale() { is_stale_ = true; }
  /// If mark_stale() was called, renews what is computed with, and gathers it. Tells peers, so that
  /// a write on some ranks alone is an error.
  void renew_stale(const engine::Stream& stream);
  /// After renew(): gathers what other ranks renewed. Until then only gathers may read the copies.
  void gather_renewed();

  // Gradients.

  /// A gradient was begun and is not reduced.
  bool has_gradient() const { return gradient_home_ != nullptr; }
  /// Makes the gradient views writable.
  void begin_gradient(const engine::Stream& compute);
  /// Hands the gradient that was begun to the reducer, zero where nothing was written. `is_last`:
  /// of the step.
  void reduce_gradient(const engine::Stream& compute, bool is_last);

  // The step.

  void begin_step(const engine::Stream& compute);
  /// After the last reduction: makes `stream` wait for the sums, but for what of them lies on the
  /// host.
  void wait_for_sums(const engine::Stream& stream);
  /// When what of the sums lies on the host is stored there.
  const engine::Event& sum_stored() const { return sum_stored_; }
  /// At the end of a step: makes `compute` wait as wait_for_sums(); without any reduction the sums
  /// are zero.
  void finish_step(const engine::Stream& compute);
  /// Of the trainable flat; null if there is none, or before set_up().
  Reducer* reducer() const { return reducer_.get(); }
  /// Whether this rank's backward reached each trainable parameter in the step.
  const std::vector<std::uint8_t>& used() const { return used_; }
  /// Sets Flat::unused of the trainable flat.
  void set_unused(std::vector<std::uint8_t> unused);

 private:
  enum class Values { kInitial, kNone };
  // Of the parameters since their last gather.
  enum class Use { kNever, kNow, kBefore };
  // Of the gradients of a step; whole once the reducer has finished.
  enum class Sum { kEmpty, kBegun, kWhole };
  void create_flats(Values values);
  void bind(const Flat& flat, const engine::Tensor& value);
  void initialise(Flat& flat) const;
  bool sum_takes_gradient() const;
  void give_gradient_back(engine::Event last_use);
  void fetch_sum(bool has_sum);
  void store_sum(bool is_final);
  void add_squares_of_sum();
  void wait_for_updates(const engine::Stream& stream);

  UnitContext& context_;
  std::vector<engine::Block*> blocks_;
  std::string name_;
  bool is_root_;
  std::vector<Flat> flats_;  // the trainable one first
  std::vector<std::uint8_t> used_;

  std::shared_ptr<engine::Buffer> gathered_, gradient_;
  std::vector<std::unique_ptr<ParameterStore>> stores_;  // of each flat
  std::unique_ptr<Reducer> reducer_;                     // of the trainable flat
  engine::Tensor gradient_view_;                         // (flat_numel), accumulation dtype
  SplitTensor sum_;              // where the reducer's sum lies between reductions
  SumSlot* sum_slot_ = nullptr;  // where it lies in them, if `sum_` is partly on the host
  engine::Event sum_on_device_, sum_stored_;  // in the parts of sum_, the host's last
  engine::Event reduced_;                     // what was handed to the reducer last
  std::vector<engine::Event> updated_;        // sum_ was read for the last time
  SlotRing* parameter_ring_ = nullptr;
  SlotRing* gradient_ring_ = nullptr;
  SlotRing::Slot* parameter_slot_ = nullptr;
  SlotRing::Slot* gradient_slot_ = nullptr;
  std::shared_ptr<engine::Buffer> gradient_home_;  // of a gradient that was begun: slot's, or sum's
  Use use_ = Use::kNever;
  Sum sum_state_ = Sum::kEmpty;
  bool has_squares_ = false;      // of the step's sum
  bool updated_in_step_ = false;  // see forbid_use()
  bool is_stale_ = false;
  bool is_kept_ = false;
  std::int64_t first_parameter_ = 0;
};

}  // namespace tessera::shard

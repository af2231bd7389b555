// Unit: parameters that are gathered, computed with and reduced together.
//
//   SHARDED --unshard--> UNSHARDED --reshard--> SHARDED
//
// Memory: the shard always; a parameter slot while unsharded; a gradient slot from before_backward
// until the gradient is reduced. Parameters are views into the slot that the gather writes, their
// gradients views into the slot that the reduction reads: nothing is copied in or out.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/tape.h"
#include "shard/layout.h"
#include "shard/options.h"
#include "shard/slots.h"

namespace tessera::shard {

class Schedule;

/// One flat buffer of a unit: its trainable or its frozen parameters.
struct Flat {
  std::vector<engine::Parameter*> parameters;
  Layout layout;
  std::vector<Segment> segments;  ///< of this rank's shard
  bool trainable;
  std::int64_t gathered_offset_nbytes;  ///< in the unit's slot

  engine::Tensor master;    ///< (shard_numel) f32
  engine::Tensor wire;      ///< (shard_numel) in the parameter dtype; is `master` for f32
  engine::Tensor gathered;  ///< (flat_numel) view of the slot
  engine::Tensor grad;      ///< (flat_numel) view of the gradient slot, accumulation dtype
  engine::Tensor grad_sum;  ///< (shard_numel) f32: the running sum over ranks and micro-steps
  /// (segments, 4) i64 on a GPU, for kernels: shard_begin, numel, index and rank of the parameter.
  engine::Tensor segment_table;
};

/// What all units of one Fsdp share. Outlives them.
struct UnitContext {
  comm::ProcessGroup* group;
  engine::Memory memory;
  engine::Memory pinned;  ///< what the host reads of a GPU's; plain on the CPU
  engine::Stream comm;
  FsdpOptions options;
  Schedule* schedule;
  engine::Event updated = {};          ///< the optimizer's last write to the shards
  bool last_micro_step = true;         ///< of the step: Communicate::kLastMicroStep reduces now
  engine::Tensor reduce_staging = {};  ///< in the reduction dtype, if a cast is needed
};

class Unit : public engine::RegionHooks {
 public:
  Unit(UnitContext& context, std::vector<engine::Block*> blocks, bool is_root);
  ~Unit() override;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  bool is_root() const { return is_root_; }
  std::vector<Flat>& flats() { return flats_; }
  std::int64_t gathered_nbytes() const { return gathered_->nbytes(); }
  std::int64_t gradient_nbytes() const { return gradient_->nbytes(); }
  /// Where slots come from; set once, before the first step.
  void set_rings(SlotRing* parameters, SlotRing* gradients);

  // The four calls of a region.
  void before_forward(const engine::Block& block, const engine::Tape& tape) override;
  void after_forward(const engine::Block& block, const engine::Tape& tape) override;
  void before_backward(const engine::Block& block, const engine::Tape& tape) override;
  void after_backward(const engine::Block& block, const engine::Tape& tape) override;

  // For the schedule.

  bool unsharded() const { return gathered_->resident(); }
  bool can_prefetch() const;
  /// Starts the gather on the comm stream, unless unsharded. `why` ends the collective's label.
  void unshard(const engine::Stream& compute, const char* why);
  void wait_for_unshard(const engine::Stream& compute);
  /// Gives the slot back once `compute` has done what it was told so far.
  void reshard(const engine::Stream& compute);
  /// Ends a forward visit that waits for further blocks of this unit.
  void close_visit(const engine::Stream& compute);

  // For the step.

  void begin_step();
  void begin_micro_step(const engine::Stream& compute);
  /// Waits for the reduction. A unit that no backward reached has a zero gradient.
  void finish_step(const engine::Stream& compute);
  /// Masters changed: renews the wire copies and gives gathered ones back.
  void refresh(const engine::Stream& compute);

 private:
  // Consecutive blocks of this unit in one forward; [Note: visits] in unit.cc.
  struct Visit {
    std::size_t first, last;  // block indices
    bool will_backward;
  };

  std::size_t index_of(const engine::Block& block) const;
  void create_flats();
  void begin_gradient(const engine::Stream& compute);
  void reduce_gradient(const engine::Stream& compute);
  void reduce(Flat& flat);

  UnitContext& context_;
  std::vector<engine::Block*> blocks_;
  std::string name_;
  bool is_root_;
  std::vector<Flat> flats_;

  std::shared_ptr<engine::Buffer> gathered_, gradient_;
  SlotRing* parameter_ring_ = nullptr;
  SlotRing* gradient_ring_ = nullptr;
  SlotRing::Slot* parameter_slot_ = nullptr;
  SlotRing::Slot* gradient_slot_ = nullptr;
  engine::Event gathered_event_, reduced_;

  bool in_use_ = false;
  int num_open_blocks_ = 0;              // regions between before_forward and after_forward
  std::optional<Visit> visit_;           // the open forward visit
  std::vector<Visit> visits_;            // closed ones whose backward is to come
  std::optional<Visit> backward_visit_;  // the one in backward
  bool reduced_in_step_ = false;
};

}  // namespace tessera::shard

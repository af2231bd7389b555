// Optimizers over the local shards: each rank updates what it owns, whatever the strategy. Updates
// are elementwise in f32, so they do not depend on how parameters are split.
//
// sgd.h and adamw.h are made of rule_optimizer.h, which is what an optimizer of one's own needs.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"
#include "shard/fsdp.h"
#include "shard/grad_norm.h"
#include "shard/joint_norm.h"
#include "shard/optimizer/rule_kernels.h"
#include "shard/optimizer/update_parts.h"

namespace tessera::shard {

/// What the mean gradient is multiplied with.
struct ClipFactor {
  double value = 1;
};

/// Parameters that are updated with values of their own. Values may change between steps.
struct ParameterGroup {
  std::string name;
  std::vector<std::string> parameters = {};  ///< full names; of a default group: none
  double lr_scale = 1;                       ///< times the learning rate of the step
  double weight_decay = 0;
};

class Optimizer : private FlatUser {
 public:
  ~Optimizer() override;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // All throw InvalidArgument unless Fsdp::finish_step() came before, once for each step, and
  // CommError if ranks differ in the number of steps, the learning rate, the clipping or a group.

  /// One update with the mean gradient, whose norm is brought down to `max_norm` (0: whatever it
  /// is). If a gradient is not finite (see FsdpOptions::non_finite) nothing changes, and the step
  /// is not counted: GradNorm::not_finite() says so. On a GPU without waiting for `norm`. That is
  /// decided by the ranks of this Fsdp alone: a model of several goes on together with
  /// joint_norm().
  void step(double lr, const GradNorm& norm, double max_norm);
  /// The same with the norm over several Fsdps, whose optimizers all are given it: if a gradient of
  /// any of them is not finite none changes anything, on any rank; JointNorm::not_finite() says so.
  void step(double lr, const JointNorm& norm, double max_norm);
  /// One update with the mean gradient times `clip`.
  void step(double lr, ClipFactor clip = {});

  /// Before Fsdp::begin_step(): the update of the step that begins, made beside its last backward,
  /// of each unit as soon as its gradient is final and no region that is recomputed is to use it
  /// again, see replays.h. Fsdp::finish_step() ends it; no step() follows.
  ///
  ///   optimizer.step_in_backward(lr);
  ///   fsdp.begin_step();
  ///   tape.backward(loss);
  ///   fsdp.finish_step();
  ///
  /// Bits are those of step(lr). The norm is known when most is updated, so nothing is clipped, and
  /// if a gradient is not finite, which finish_step() or on a GPU reading the norm throws for,
  /// parameters and states are spoilt. Until finish_step() parameters are partly new: a forward
  /// behind the last backward throws InvalidArgument, and so does one inside no_grad() in a
  /// recomputed region around which no block is wrapped; read none, and leave groups as they are.
  /// Throws InvalidArgument as Fsdp::take_gradients_early() does, CommError if ranks differ.
  void step_in_backward(double lr, UpdateGathers gathers = UpdateGathers::kInterleaved);

  /// Before each launch of a step that was captured with step(): the update that it makes has this
  /// learning rate, and counts. Throws InvalidArgument for an optimizer that cannot be captured.
  void repeat_step(double lr);

  // The same in parts: begin, every unit once, end. Units may be updated in any order.

  void begin_step(double lr, const GradNorm& norm, double max_norm);
  void begin_step(double lr, const JointNorm& norm, double max_norm);
  void begin_step(double lr, ClipFactor clip);
  /// Updates what this rank owns of the unit as work of `stream`, which has waited for its
  /// gradient, and starts what renews the copies that are computed with.
  void step_unit(Unit& unit, const engine::Stream& stream);
  void end_step();

  const std::vector<ParameterGroup>& groups() const { return groups_; }
  /// Throws InvalidArgument naming the groups there are, if there is none of that name.
  ParameterGroup& group(std::string_view name);

  // State, for checkpoints: by parameter, whatever the ranks and the strategy.

  const std::vector<std::string>& state_names() const { return state_names_; }
  /// What this rank has of the state `name` of the flat that a trainable parameter is in, laid out
  /// like Flat::master; with offload ready behind Fsdp::synchronize(). Throws InvalidArgument
  /// naming what is unknown, or frozen.
  const SplitTensor& state(const Fsdp::Location& at, std::string_view name) const;
  /// Collective: the whole state `name` of a trainable parameter, on every rank. Throws
  /// InvalidArgument naming what is unknown.
  std::vector<float> full_state(const engine::Parameter& p, std::string_view name);
  /// Sets it from its whole value; each rank keeps its part. Not collective.
  void load_state(const engine::Parameter& p, std::string_view name, std::span<const float> values);
  /// Updates made; on a GPU blocks until they are counted.
  std::int64_t num_steps() const;
  void set_num_steps(std::int64_t num_steps);

 protected:
  /// What the host of a GPU knows once the norm of the gradient is there.
  struct HostStep {
    bool skips;  // a gradient is not finite
    double clip;
    std::int64_t num_steps;  // this one included, if it is not skipped
  };
  /// What a step is made with.
  struct Step {
    double lr = 0;
    std::shared_ptr<const std::vector<GroupRates>> groups = {};  // group_rates()
    double mean_scale = 1;                 // gradient sums times this are the mean
    double clip = 1;                       // used when `norm` is undefined
    bool skips = false;                    // a gradient is not finite; on a GPU `norm` says so
    engine::Tensor norm = {};              // on a GPU: GradNorm::on_device()
    double max_norm = 0;                   // with `norm`: 0 means no clipping
    std::int64_t num_steps = 0;            // this one included; counted on a GPU by `steps_on_gpu`
    engine::Tensor num_steps_on_gpu = {};  // (1) i32
    bool is_captured = false;              // rates are those of set_rates()
    // Of a GPU that offloads: where its host prepares for updates there, and with what: to be
    // called once, by work of that stream.
    const engine::Stream* host = nullptr;
    std::function<HostStep()> on_host = {};
  };
  /// One trainable flat of this rank, or a part of it: with offload some parts lie, and are
  /// updated, on the host. All tensors lie on the device of the stream.
  struct Target {
    const std::string& unit;
    engine::Tensor master, grad_sum;     // (numel) f32
    std::span<const Segment> segments;   // `shard_begin` counts from the tensors' first element
    engine::Tensor tiles;                // on a GPU: the same, as rows of Tile
    std::vector<engine::Tensor> states;  // (numel) f32 each, as state_names()
    // Of each parameter of the flat; -1: left as it is. `groups_on_gpu`: the same.
    std::shared_ptr<const std::vector<std::int32_t>> groups;
    engine::Tensor groups_on_gpu;
  };

  /// `fsdp` outlives the optimizer. Groups that parameters listed in none belong to come first:
  /// `default_group` says which. Throws InvalidArgument for a group that lists a parameter that is
  /// not wrapped (frozen ones may be set free later), a parameter in two groups, two groups of one
  /// name, and more than kMaxGroups.
  Optimizer(Fsdp& fsdp, std::vector<std::string> state_names, std::vector<ParameterGroup> groups,
            const std::function<std::size_t(const engine::Parameter&)>& default_group);
  Fsdp& fsdp() const { return fsdp_; }
  /// What the groups have now: the same vector until one of them changes.
  std::shared_ptr<const std::vector<GroupRates>> group_rates();
  /// To be called by the destructor of whoever launches functions that use its own members.
  void end_updates() noexcept { fsdp_.end_updates(); }

  /// Before the flats of a step, as work of the compute stream on a GPU.
  virtual void prepare(const Step& step) = 0;
  /// For steps that are captured: learning rate and groups of the next, as work of the compute
  /// stream. Throws InvalidArgument unless overridden.
  virtual void set_rates(double lr);
  /// The update, as work of `stream`. May run beside that of other parts.
  virtual void update(const Target& target, const engine::Stream& stream) = 0;

 private:
  void before_recut(const Unit& unit) override;
  void after_recut(const Unit& unit) override;
  void create_slots(const Unit& unit);

  // What belongs to one trainable flat.
  struct Slot {
    const Unit* unit;
    const Flat* flat;
    std::vector<UpdatePart> parts;
    std::vector<SplitTensor> states;
    std::vector<std::int32_t> groups;
    std::shared_ptr<const std::vector<std::int32_t>> step_groups;  // -1: no gradient in this step
    engine::Tensor groups_on_gpu;                                  // the same
    bool is_updated = false;                                       // in this step
  };
  std::string describe(const Step& step);
  static void leave_unused(Slot& slot);
  void begin_step(Step step);
  void prepare_step(Step step);
  void step_units();
  void stage_updates();
  std::function<HostStep()> host_step_of(const GradNorm& norm, double max_norm);
  void update_slot(Slot& slot, Unit& unit, const engine::Stream& stream);

  Fsdp& fsdp_;
  std::vector<std::string> state_names_;
  std::vector<ParameterGroup> groups_;
  std::shared_ptr<const std::vector<GroupRates>> group_rates_;
  std::string groups_text_;                      // of those
  std::map<std::string, std::size_t> group_of_;  // each listed parameter
  std::function<std::size_t(const engine::Parameter&)> default_group_;
  std::vector<Slot> slots_;
  // While a unit is laid out anew: the states of its parameters, whole.
  std::map<const engine::Parameter*, std::vector<std::vector<float>>> kept_;
  bool skips_ = false;  // the step at work
  std::int64_t num_steps_ = 0;
  engine::Tensor num_steps_on_gpu_;
  std::int64_t num_steps_on_host_ = 0;  // the same, of a thread of the host
  // Norms that a thread of the host reads, and when it has.
  struct NormInUse {
    GradNorm norm;
    engine::Event read;
  };
  std::deque<NormInUse> norms_in_use_;
  std::unique_ptr<UpdateParts> offloaded_;  // null: nothing is
};

}  // namespace tessera::shard

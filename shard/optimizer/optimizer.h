// Optimizers: each rank updates the masters that it owns, a unit at a time, whatever the strategy.
//
// There are two kinds. One that updates each element by itself is a rule, see rule_optimizer.h:
// sgd.h and adamw.h are such, and it runs on GPUs and where parameters are offloaded. One that
// needs whole matrices derives from Optimizer itself and says what becomes of a unit, as
// examples/spectral_sign.h does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/tensor.h"
#include "shard/fsdp.h"
#include "shard/grad_norm.h"
#include "shard/joint_norm.h"
#include "shard/optimizer/rule_kernels.h"

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

/// What an optimizer is made with.
struct OptimizerTraits {
  std::string name = {};  ///< for errors of one that is not elementwise
  /// Of its states: f32 tensors like the parameters, zero at first, cut as the masters are, and
  /// kept by checkpoints.
  std::vector<std::string> states = {};
  std::vector<ParameterGroup> groups = {};
  /// Which group has a parameter that none of them lists; null: the first.
  std::function<std::size_t(const engine::Parameter&)> default_group = {};
  /// Which parameters it updates; null: all. It leaves the others to another optimizer of the Fsdp:
  /// see step_together.h. Asked once for each, and again where it is frozen or set free.
  std::function<bool(const engine::Parameter&)> updates = {};
  /// ElementwiseOptimizer says so: it knows what lies on the host, and on a GPU how its kernels
  /// clip and skip steps. Of others offload is refused, and the host waits for the norm.
  bool is_elementwise = false;
};

class Optimizer : private FlatUser {
 public:
  ~Optimizer() override;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // All throw InvalidArgument unless Fsdp::finish_step() came before, once for each step, and if
  // the optimizer leaves trainable parameters to another one (then see step_together.h); and
  // CommError if ranks differ in the number of steps, the learning rate, the clipping or a group.

  /// One update with the mean gradient, whose norm is brought down to `max_norm` (0: whatever it
  /// is). If a gradient is not finite (see FsdpOptions::non_finite) nothing changes, and the step
  /// is not counted: GradNorm::not_finite() says so. Whether one is finite is decided by the
  /// ranks of this Fsdp alone: a model of several goes on together with joint_norm(). On a GPU an
  /// elementwise optimizer does not wait for `norm`; others do, and throw InvalidArgument in a
  /// capture.
  void step(double lr, const GradNorm& norm, double max_norm);
  /// step() with the norm over several Fsdps, whose optimizers all are given it: if a gradient of
  /// any of them is not finite none changes anything, on any rank; JointNorm::not_finite() says so.
  void step(double lr, const JointNorm& norm, double max_norm);
  /// One update with the mean gradient times `clip`.
  void step(double lr, ClipFactor clip = {});

  /// Before Fsdp::begin_step(): the update of the step that begins, made during its last backward,
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
  /// after the last backward throws InvalidArgument, and so does one inside no_grad() in a
  /// recomputed region around which no block is wrapped; read none, and leave groups as they are.
  /// Throws InvalidArgument inside a step, for the second time before one, with
  /// UnusedParameters::kSkip or NonFinite::kSkip, as only the end of a step shows what is unused or
  /// not finite, and for an optimizer that is not elementwise; CommError if ranks differ.
  void step_in_backward(double lr, UpdateGathers gathers = UpdateGathers::kInterleaved);

  /// Before each launch of a step that was captured with step(): the update that it makes has this
  /// learning rate, and counts. Throws InvalidArgument for an optimizer that cannot be captured.
  void repeat_step(double lr);

  // A step in parts: begin, every unit once, end. Units may be updated in any order.

  void begin_step(double lr, const GradNorm& norm, double max_norm);
  void begin_step(double lr, const JointNorm& norm, double max_norm);
  void begin_step(double lr, ClipFactor clip);
  /// Updates what this rank owns of the unit as work of `stream`, which has waited for its
  /// gradient, and starts what renews the copies that are computed with.
  void step_unit(Unit& unit, const engine::Stream& stream);
  void end_step();

  const std::vector<ParameterGroup>& groups() const { return traits_.groups; }
  /// Throws InvalidArgument naming the groups there are, if there is none of that name.
  ParameterGroup& group(std::string_view name);

  /// Whether this optimizer updates it, or another one does; see OptimizerTraits.
  bool updates(const engine::Parameter& p) const { return !traits_.updates || traits_.updates(p); }

  // State, for checkpoints: by parameter, whatever the ranks and the strategy.

  const std::vector<std::string>& state_names() const { return traits_.states; }
  /// What this rank has of the state `name` of the flat that a trainable parameter is in, laid out
  /// like Flat::master; with offload ready after Fsdp::synchronize(). Of parameters of the flat
  /// that another optimizer updates it is zero. Throws InvalidArgument naming what is unknown,
  /// frozen, or updated by another one.
  const SplitTensor& state(const Location& at, std::string_view name) const;
  /// Collective: the whole state `name` of a trainable parameter, on every rank. Throws
  /// InvalidArgument naming what is unknown, or not updated.
  std::vector<float> full_state(const engine::Parameter& p, std::string_view name);
  /// Sets it from its whole value; each rank keeps its part. Not collective.
  void load_state(const engine::Parameter& p, std::string_view name, std::span<const float> values);
  /// Updates made; on a GPU blocks until they are counted.
  virtual std::int64_t num_steps() const { return num_steps_; }
  virtual void set_num_steps(std::int64_t num_steps);

 protected:
  /// What a step is made with.
  struct Step {
    double lr = 0;
    std::shared_ptr<const std::vector<GroupRates>> groups = {};  // group_rates()
    double mean_scale = 1;              // gradient sums times this are the mean
    double clip = 1;                    // and times this are clipped
    bool skips = false;                 // a gradient is not finite: nothing is updated
    std::optional<GradNorm> norm = {};  // elementwise, on a GPU: says there what both are
    double max_norm = 0;                // with `norm`: 0 means no clipping
    std::int64_t num_steps = 0;         // this one included, if it is not skipped
    bool is_captured = false;           // rates are those of set_rates()
  };
  /// The trainable parameters of a unit, and what this rank has of them.
  struct UnitUpdate {
    const Unit& unit;
    /// Parameters with shapes, how they are laid out and cut, masters and sums of gradients.
    const Flat& flat;
    std::span<const SplitTensor> states;  // as state_names(), laid out like Flat::master
    const Step& step;
    // The group of each parameter, or -1 unless has_gradient(); `groups_on_gpu` for kernels.
    std::shared_ptr<const std::vector<std::int32_t>> groups;
    engine::Tensor groups_on_gpu;
    /// The update is work of this, which has waited for the gradient, and of no other. Work may run
    /// after update_unit() returns: it captures by value, never `[&]` or the update itself.
    engine::Stream stream;
    std::vector<WrittenOnHost> on_host = {};  // elementwise: masters that the host writes

    /// False for what another optimizer updates, and with UnusedParameters::kSkip for what no
    /// rank's backward reached: it and its states are to stay as they are.
    bool has_gradient(std::size_t i) const { return (*groups)[i] >= 0; }
    /// Of parameter `i`, which has a gradient.
    double lr(std::size_t i) const;
    double weight_decay(std::size_t i) const;
    /// What gradient sums are multiplied with.
    float gradient_scale() const { return static_cast<float>(step.mean_scale * step.clip); }
  };

  /// `fsdp` outlives the optimizer. Throws InvalidArgument for a group that lists a parameter that
  /// is not wrapped (frozen ones may be set free later), or not updated, a parameter in two groups,
  /// two groups of one name, more than kMaxGroups, and unless it is elementwise for what is
  /// offloaded.
  Optimizer(Fsdp& fsdp, OptimizerTraits traits);
  Fsdp& fsdp() const { return fsdp_; }
  /// What the groups have now: the same vector until one of them changes.
  std::shared_ptr<const std::vector<GroupRates>> group_rates();
  /// To be called by the destructor of whoever launches functions that use its own members.
  void end_updates() noexcept { fsdp_.end_updates(*this); }

  /// Before the units of a step that is not skipped.
  virtual void prepare(const Step&) {}
  /// Writes the masters that this rank owns of a unit, as Flat::segments say, and their states. May
  /// run while other units are updated.
  virtual void update_unit(UnitUpdate& update) = 0;
  /// Collective: all of what each rank has a part of, laid out like Flat::master, such as a state.
  /// Parameter i begins at element Flat::layout.offset(i). One all_gather, or two where the parts
  /// are cut over a grid of ranks; none where this rank owns all, which is then what it returns.
  /// As work of the update's stream, on every rank alike; on a GPU that is the compute stream.
  engine::Tensor gather(const UnitUpdate& update, const SplitTensor& owned) const;
  /// For steps that are captured: learning rate and groups of the next, as work of the compute
  /// stream. Throws InvalidArgument unless overridden.
  virtual void set_rates(double lr);
  void before_recut(const Unit& unit) override;
  void after_recut(const Unit& unit) override;

 private:
  void create_slots(const Unit& unit);

  // What belongs to one trainable flat.
  struct Slot {
    const Unit* unit;
    const Flat* flat;
    std::vector<SplitTensor> states;
    std::vector<std::int32_t> groups;                              // -1: not updated here
    std::shared_ptr<const std::vector<std::int32_t>> step_groups;  // -1: nor is it in this step
    engine::Tensor groups_on_gpu;                                  // step_groups
    bool is_updated = false;                                       // in this step
  };
  friend struct TogetherStep;  // step_together.h

  static bool is_idle(const Slot& slot);
  Step step_of(double lr, const GradNorm& norm, double max_norm) const;
  static Step step_of(double lr, const JointNorm& norm, double max_norm);
  void check_updates_all() const;
  bool update_slot(Unit& unit, const engine::Stream& stream, bool renews);
  void check_all_updated() const;
  static void run_together(std::vector<std::pair<Optimizer*, Step>> steps);
  std::string describe(const Step& step);
  static void leave_unused(Slot& slot);
  void begin_step(Step step);
  void check_can_capture() const;
  void prepare_step(Step step);
  void step_units();

  Fsdp& fsdp_;
  OptimizerTraits traits_;
  std::shared_ptr<const std::vector<GroupRates>> group_rates_;
  std::string groups_text_;                      // of those
  std::map<std::string, std::size_t> group_of_;  // each listed parameter
  std::vector<Slot> slots_;
  // While a unit is laid out again: the states of its parameters, whole.
  std::map<const engine::Parameter*, std::vector<std::vector<float>>> kept_;
  Step step_;  // at work
  std::int64_t num_steps_ = 0;
};

}  // namespace tessera::shard

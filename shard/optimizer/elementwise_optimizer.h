// Optimizers that update each element by itself, in f32: bits do not depend on how parameters are
// cut, nor on where their parts lie. rule_optimizer.h makes one of a function of an element.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shard/optimizer/optimizer.h"
#include "shard/optimizer/update_parts.h"

namespace tessera::shard {

class ElementwiseOptimizer : public Optimizer {
 public:
  ~ElementwiseOptimizer() override { end_updates(); }
  std::int64_t num_steps() const override;
  void set_num_steps(std::int64_t num_steps) override;

 protected:
  /// What the host of a GPU knows once the norm of the gradient is there.
  struct HostStep {
    bool skips;  // a gradient is not finite
    double clip;
    std::int64_t num_steps;  // this one included, if it is not skipped
  };
  /// Of a GPU that offloads: where its host prepares for updates there, and with what: to be called
  /// once, by work of that stream.
  struct HostPart {
    const engine::Stream& stream;
    std::function<HostStep()> step;
  };
  /// What this rank owns of a flat, or a part of it: with offload some parts lie, and are updated,
  /// on the host. All tensors lie on the device of the stream.
  struct Target {
    const std::string& unit;
    /// The parameters, with names and shapes, and their layout. Its own master and sum may lie
    /// elsewhere: those to be used are the next two.
    const Flat& flat;
    engine::Tensor master, grad_sum;  // (numel) f32
    /// Elements [parameter_begin, parameter_begin + numel) of flat.parameters[parameter], which are
    /// elements [shard_begin, shard_begin + numel) of `master`, `grad_sum` and `states`. What lies
    /// between segments is padding.
    std::span<const Segment> segments;
    engine::Tensor tiles;                // on a GPU: the segments as rows of Tile
    std::vector<engine::Tensor> states;  // (numel) f32 each, as state_names()
    // Of each parameter of the flat its index in groups(); -1: left as it is. `groups_on_gpu`: the
    // same.
    std::shared_ptr<const std::vector<std::int32_t>> groups;
    engine::Tensor groups_on_gpu;
  };

  ElementwiseOptimizer(Fsdp& fsdp, OptimizerTraits traits);

  /// Before the updates of a step, as work of the compute stream on a GPU. `host`: null where
  /// nothing is updated on the host of a GPU.
  virtual void prepare_parts(const Step& /*step*/, const HostPart* /*host*/) {}
  /// Launches the update of `target` on `stream` and on no other: what it reads is ready there, and
  /// what it writes is used after it there. That is the compute stream, with step_in_backward()
  /// another one, and with offload for parts on the host a stream of the host. May be called while
  /// other parts are updated.
  ///
  /// What is launched may run after this returns, on any but an inline stream. So it owns what it
  /// uses: it captures by value, addresses included, and `target.groups`, never `[&]` or `target`.
  /// What `target.flat`, `unit` and `segments` refer to, and the memory of its tensors, stay until
  /// the step's updates are done. It may use this optimizer's members, as end_updates() in the
  /// destructor waits for it, if they stay as they are until then:
  ///
  ///   stream.launch({.name = "sgd"}, [lr = lr_, p = target.master, g = target.grad_sum,
  ///                                   segments = target.segments, groups = target.groups] { ...
  ///                                   });
  virtual void update(const Target& target, const engine::Stream& stream) = 0;
  /// (1) i32 on a GPU: updates made, which kernels count. Undefined on the CPU.
  const engine::Tensor& num_steps_on_gpu() const { return num_steps_on_gpu_; }

 private:
  void prepare(const Step& step) final;
  void update_unit(UnitUpdate& update) final;
  void before_recut(const Unit& unit) final;
  void after_recut(const Unit& unit) final;
  void create_parts(const Unit& unit);
  void stage_updates();
  std::function<HostStep()> host_step_of(const Step& step);

  std::map<const Unit*, std::vector<UpdatePart>> parts_;
  engine::Tensor num_steps_on_gpu_;
  std::int64_t num_steps_on_host_ = 0;  // of a GPU: as many, counted by a thread of the host
  // Norms that a thread of the host reads, and when it has.
  struct NormInUse {
    GradNorm norm;
    engine::Event read;
  };
  std::deque<NormInUse> norms_in_use_;
  std::unique_ptr<UpdateParts> offloaded_;  // null: nothing is
};

}  // namespace tessera::shard

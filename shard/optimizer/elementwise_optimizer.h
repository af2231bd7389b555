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
    engine::Tensor master, grad_sum;     // (numel) f32
    std::span<const Segment> segments;   // `shard_begin` counts from the tensors' first element
    engine::Tensor tiles;                // on a GPU: the same, as rows of Tile
    std::vector<engine::Tensor> states;  // (numel) f32 each, as state_names()
    // Of each parameter of the flat; -1: left as it is. `groups_on_gpu`: the same.
    std::shared_ptr<const std::vector<std::int32_t>> groups;
    engine::Tensor groups_on_gpu;
  };

  ElementwiseOptimizer(Fsdp& fsdp, OptimizerTraits traits);

  /// Before the updates of a step, as work of the compute stream on a GPU. `host`: null where
  /// nothing is updated on the host of a GPU.
  virtual void prepare_parts(const Step& /*step*/, const HostPart* /*host*/) {}
  /// The update, as work of `stream`. May run while other parts are updated.
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

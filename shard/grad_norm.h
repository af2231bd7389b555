// The norm of a step's gradient: the same bits for every strategy.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/host_gather.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/unit.h"

namespace tessera::shard {

/// The norm of the mean gradient of a step over ranks and micro-steps. On a GPU it stays there, and
/// comes to the host when somebody asks; a value handle, which the group outlives. That of a
/// captured step can be read by kernels alone; see Fsdp::read_norm().
class GradNorm {
 public:
  /// On a GPU blocks until it is known. Throws InvalidArgument naming a parameter whose gradient is
  /// not finite, on every rank alike; CommError if the group failed meanwhile.
  float value() const;
  /// Which gradient is not finite, for people: "h.0.weight", or with FsdpOptions::check_gradients
  /// "h.0.weight, rank 1, micro-step 2"; empty if all are. Blocks and throws CommError as value().
  std::string not_finite() const;
  /// value() would not block.
  bool is_known() const;
  /// For threads other than the one that drives the group: what value() returns, or nothing if a
  /// gradient is not finite. Blocks. Does not look whether the group failed: then it means nothing.
  std::optional<float> unchecked_value() const;
  /// What unchecked_value() returns, as a function for a thread that a GPU may wait for
  /// (Event::for_host). This norm, or another handle of it, must outlive the function.
  std::function<std::optional<float>()> unchecked_value_for_host() const;
  /// (2) i32 on a GPU, for kernels: the bits of the f32 norm, and 0 if every gradient is finite;
  /// otherwise 1 + the first trainable parameter where it is not, and the first means nothing.
  /// Undefined on the CPU.
  const engine::Tensor& on_device() const { return state_->on_device; }

 private:
  struct State {
    comm::ProcessGroup* group;
    std::vector<const engine::Parameter*> parameters;  // trainable, in the order of units
    engine::Tensor on_device, on_host;                 // (2) i32 each
    engine::Event copied;
    std::shared_ptr<const GradientCheck> check;
    std::optional<comm::HostGather> findings;  // of `check`

    std::optional<float> finite_value() const;  // once copied
  };
  explicit GradNorm(std::shared_ptr<State> state) : state_(std::move(state)) {}
  friend GradNorm reduce_norm(const UnitContext& context, const engine::Stream& compute,
                              const std::vector<std::unique_ptr<Unit>>& units, double mean_scale);
  friend GradNorm copy_norm(const UnitContext& context, const engine::Stream& compute,
                            const GradNorm& norm);
  void read(const engine::Stream& compute);
  std::shared_ptr<State> state_;
};

/// On a GPU: what `norm`, of a captured step, is once `compute` gets there, in memory of its own.
GradNorm copy_norm(const UnitContext& context, const engine::Stream& compute, const GradNorm& norm);

/// The norm of the gradient sums times `mean_scale`, which `compute` has waited for: each rank adds
/// up what its optimizer owns, and one gather among those who own parts makes it whole. Collective.
/// On the CPU throws what GradNorm::value() would, unless the options say kSkip.
GradNorm reduce_norm(const UnitContext& context, const engine::Stream& compute,
                     const std::vector<std::unique_ptr<Unit>>& units, double mean_scale);

/// What gradients are multiplied with so that their norm is at most `max_norm`; 0: no clipping.
/// max_norm / (norm + 1e-6) as in torch.nn.utils.clip_grad_norm_, at most 1.
double clip_scale(float norm, double max_norm);

}  // namespace tessera::shard

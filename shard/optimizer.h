// Optimizers over the local shards: each rank updates what it holds, whatever the strategy.
// Updates are elementwise in f32, so they do not depend on how parameters are split.
#pragma once

#include <memory>
#include <vector>

#include "engine/tensor.h"
#include "shard/fsdp.h"
#include "shard/grad_norm.h"

namespace tessera::shard {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One update with the mean gradient, whose norm is brought down to `max_norm` (0: whatever it
  /// is), after Fsdp::finish_step(). On a GPU without waiting for `norm`: an update whose gradient
  /// is not finite changes nothing, as reading the norm will say.
  void step(double lr, const GradNorm& norm, double max_norm);
  /// One update with the mean gradient times `clip`.
  void step(double lr, double clip = 1);

 protected:
  explicit Optimizer(Fsdp& fsdp);
  Fsdp& fsdp() { return fsdp_; }
  /// One f32 tensor a trainable flat, zero-filled, in order.
  std::vector<engine::Tensor> make_state(const char* name);

 private:
  struct Clip {
    double factor = 1;
    const GradNorm* norm = nullptr;  // if not null: on a GPU, with `max_norm`
    double max_norm = 0;
  };
  struct Slice {
    const engine::Parameter& parameter;
    float* p;        // (numel) master
    const float* g;  // (numel) gradient sum; times `scale` it is the gradient
    std::int64_t numel;
    std::size_t flat;          // index of the trainable flat, as in make_state()
    std::int64_t shard_begin;  // of this slice in its shard
  };
  friend class Sgd;
  friend class AdamW;
  void step(double lr, const Clip& clip);
  struct ClipCuda to_cuda(const Clip& clip) const;
  // Before the flats of a step, and each of them: on the CPU a slice at a time.
  virtual void begin_update(double lr, const Clip& clip) = 0;
  virtual void update(const Slice& slice, float lr, float scale) = 0;
  virtual void update_on_gpu(const engine::Stream& stream, const Flat& flat, std::size_t index,
                             double lr) = 0;

  Fsdp& fsdp_;
  engine::Tensor scalars_;  // of a step, on a GPU
};

struct SgdOptions {
  double momentum = 0;
};

/// v = momentum v + g; p -= lr v. State: v, if momentum is not 0.
class Sgd : public Optimizer {
 public:
  /// Throws InvalidArgument unless 0 <= momentum < 1.
  Sgd(Fsdp& fsdp, SgdOptions options);

 private:
  void begin_update(double lr, const Clip& clip) override;
  void update(const Slice& slice, float lr, float scale) override;
  void update_on_gpu(const engine::Stream& stream, const Flat& flat, std::size_t index,
                     double lr) override;
  SgdOptions options_;
  std::vector<engine::Tensor> velocity_;
};

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  ///< of parameters with two or more dimensions
};

/// Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, with bias correction.
/// State: m, v, and on a GPU the number of steps.
class AdamW : public Optimizer {
 public:
  /// Throws InvalidArgument unless 0 <= beta < 1, eps > 0, weight_decay >= 0.
  AdamW(Fsdp& fsdp, AdamWOptions options);

 private:
  void begin_update(double lr, const Clip& clip) override;
  void update(const Slice& slice, float lr, float scale) override;
  void update_on_gpu(const engine::Stream& stream, const Flat& flat, std::size_t index,
                     double lr) override;
  AdamWOptions options_;
  std::vector<engine::Tensor> m_, v_;
  int num_steps_ = 0;
  engine::Tensor num_steps_on_gpu_;
};

}  // namespace tessera::shard

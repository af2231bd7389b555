// Optimizers over the local shards: each rank updates what it holds, whatever the strategy.
// Updates are elementwise in f32, so they do not depend on how parameters are split.
#pragma once

#include <memory>
#include <vector>

#include "engine/tensor.h"
#include "shard/fsdp.h"

namespace tessera::shard {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One update with the mean gradient times `clip` (see clip_scale), after Fsdp::finish_step().
  void step(double lr, double clip = 1);

 protected:
  explicit Optimizer(Fsdp& fsdp) : fsdp_(fsdp) {}
  Fsdp& fsdp() { return fsdp_; }
  /// One f32 tensor a trainable flat, zero-filled, in order.
  std::vector<engine::Tensor> make_state(const char* name);

 private:
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
  virtual void begin_update() {}
  virtual void update(const Slice& slice, float lr, float scale) = 0;

  Fsdp& fsdp_;
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
  void update(const Slice& slice, float lr, float scale) override;
  SgdOptions options_;
  std::vector<engine::Tensor> velocity_;
};

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  ///< of parameters with two or more dimensions
};

/// Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, with bias correction.
/// State: m, v.
class AdamW : public Optimizer {
 public:
  /// Throws InvalidArgument unless 0 <= beta < 1, eps > 0, weight_decay >= 0.
  AdamW(Fsdp& fsdp, AdamWOptions options);

 private:
  void begin_update() override { ++num_steps_; }
  void update(const Slice& slice, float lr, float scale) override;
  AdamWOptions options_;
  std::vector<engine::Tensor> m_, v_;
  int num_steps_ = 0;
};

}  // namespace tessera::shard

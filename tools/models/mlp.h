// A multi-layer perceptron for classification: linear and ReLU, each layer a block.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/tape.h"
#include "tools/models/model.h"

namespace tessera::tools {

struct MlpConfig {
  std::int64_t inputs = 784;
  std::int64_t hidden = 256;
  std::int64_t layers = 3;  ///< linear layers, at least 1
  std::int64_t classes = 10;

  /// Throws InvalidArgument naming the field.
  void validate() const;
  /// Operations of the matrix products of a sample, forward and backward; the inputs have no
  /// gradient.
  double train_flops() const;
};

class Mlp : public Model {
 public:
  /// Throws InvalidArgument as MlpConfig::validate().
  explicit Mlp(const MlpConfig& config);
  ~Mlp() override;

  const MlpConfig& config() const { return config_; }
  std::vector<engine::Block*> blocks() override;

  /// x (B, inputs) in the parameter dtype -> (B, classes).
  engine::Tensor logits(engine::Tape& tape, const engine::Tensor& x);
  /// x, targets (B) i32 -> mean cross-entropy, f32 scalar.
  engine::Tensor loss(engine::Tape& tape, const std::vector<engine::Tensor>& batch,
                      const Pass& pass) override;

 private:
  struct Layer;
  engine::Tensor forward(engine::Tape& tape, const engine::Tensor& x, Recompute recompute);

  MlpConfig config_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace tessera::tools

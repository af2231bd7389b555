#include "tools/models/mlp.h"

#include <fmt/format.h>

#include <cmath>

#include "engine/error.h"
#include "ops/cross_entropy.h"
#include "ops/linear.h"
#include "ops/relu.h"

namespace tessera::tools {

using engine::Block;
using engine::Init;
using engine::require;
using engine::Tape;
using engine::Tensor;

void MlpConfig::validate() const {
  require(inputs >= 1 && hidden >= 1 && layers >= 1 && classes >= 1,
          "[mlp] expected sizes of at least 1, got inputs {}, hidden {}, layers {}, classes {}",
          inputs, hidden, layers, classes);
}

double MlpConfig::train_flops() const {
  const auto product = [](std::int64_t in, std::int64_t out) {
    return 2 * static_cast<double>(in) * static_cast<double>(out);
  };
  if (layers == 1) return 2 * product(inputs, classes);
  return 2 * product(inputs, hidden) +
         3 * (static_cast<double>(layers - 2) * product(hidden, hidden) + product(hidden, classes));
}

struct Mlp::Layer {
  // He et al., "Delving Deep into Rectifiers", 2015: keeps the variance through a ReLU.
  Layer(const std::string& name, std::int64_t in, std::int64_t out)
      : weight{.name = name + ".weight",
               .shape = {in, out},
               .init = Init::normal(std::sqrt(2.0f / static_cast<float>(in)))},
        bias{.name = name + ".bias", .shape = {out}, .init = Init::zeros()},
        block{name, {&weight, &bias}} {}

  engine::Parameter weight, bias;
  Block block;
};

Mlp::~Mlp() = default;

Mlp::Mlp(const MlpConfig& config) : config_((config.validate(), config)) {
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const std::int64_t in = i == 0 ? config.inputs : config.hidden;
    const std::int64_t out = i + 1 == config.layers ? config.classes : config.hidden;
    layers_.push_back(std::make_unique<Layer>(fmt::format("fc.{}", i), in, out));
  }
}

std::vector<Block*> Mlp::blocks() {
  std::vector<Block*> blocks;
  for (const auto& layer : layers_) blocks.push_back(&layer->block);
  return blocks;
}

Tensor Mlp::forward(Tape& tape, const Tensor& x, Recompute recompute) {
  Tensor h = x;
  for (std::int64_t i = 0; const auto& layer : layers_) {
    const bool is_last = layer == layers_.back();
    h = tape.region(layer->block,
                    [h, is_last, &tape, &l = *layer] {
                      const Tensor y = ops::linear(tape, h, l.weight, &l.bias);
                      return is_last ? y : ops::relu(tape, y);
                    },
                    {.recompute = recompute(i++)});
  }
  return h;
}

Tensor Mlp::logits(Tape& tape, const Tensor& x) { return forward(tape, x, false); }

Tensor Mlp::loss(Tape& tape, const std::vector<Tensor>& batch, const Pass& pass) {
  require(batch.size() == 2, "[mlp] expected a batch of inputs and targets, got {} tensors",
          batch.size());
  require(!pass.is_sum, "[mlp] expected to be asked for a mean, got a sum");
  return ops::cross_entropy(tape, forward(tape, batch[0], pass.recompute), batch[1]);
}

}  // namespace tessera::tools

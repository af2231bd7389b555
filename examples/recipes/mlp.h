// A perceptron for the recipes: linear layers with tanh between them.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/elementwise/unary.h"
#include "ops/linear.h"

class Mlp {
 public:
  /// From sizes.front() numbers to sizes.back(). `name` goes before those of the parameters.
  Mlp(const std::string& name, const std::vector<std::int64_t>& sizes) {
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
      layers_.emplace_back(name + "." + std::to_string(i), sizes[i], sizes[i + 1]);
    }
  }

  std::vector<tessera::engine::Block*> blocks() {
    std::vector<tessera::engine::Block*> all;
    for (Layer& layer : layers_) all.push_back(&layer.block);
    return all;
  }

  /// x (N, sizes.front()) -> (N, sizes.back()).
  tessera::engine::Tensor operator()(tessera::engine::Tape& tape, tessera::engine::Tensor x) {
    for (Layer& layer : layers_) {
      x = tape.region(layer.block, [&] {
        const auto y = tessera::ops::linear(tape, x, layer.weight, &layer.bias);
        return &layer == &layers_.back() ? y : tessera::ops::tanh(tape, y);
      });
    }
    return x;
  }

 private:
  struct Layer {
    Layer(const std::string& name, std::int64_t in, std::int64_t out)
        : weight{name + ".weight", {in, out}, tessera::engine::Init::normal(0.5f)},
          bias{name + ".bias", {out}},
          block{name, {&weight, &bias}} {}

    tessera::engine::Parameter weight, bias;
    tessera::engine::Block block;
  };
  std::deque<Layer> layers_;  // parameters do not move
};

// A vision transformer (Dosovitskiy et al., arXiv:2010.11929) with an activation of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "ops/add.h"
#include "ops/attention.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/dims/slice.h"
#include "ops/layernorm.h"
#include "ops/linear.h"
#include "ops/parameter.h"
#include "ops/pointwise_without_nvcc.h"  // for GPUs: ops/pointwise.h, and a .cu file

namespace vit {

namespace ops = tessera::ops;
using tessera::engine::Block, tessera::engine::Init, tessera::engine::Parameter;
using tessera::engine::Tape, tessera::engine::Tensor;

struct Sizes {
  std::int64_t channels, side, patch, width, heads, layers, classes;  // images are squares
};

// max(x, 0)^2 (So et al., arXiv:2109.08668).
struct SquaredRelu {
  static constexpr float value(float x) { return x > 0 ? x * x : 0; }
  static constexpr float slope(float x) { return x > 0 ? 2 * x : 0; }
};

struct Linear {
  Linear(const std::string& name, std::int64_t in, std::int64_t out)
      : weight{name + ".weight", {in, out}, Init::normal(1 / std::sqrt(float(in)))},
        bias{name + ".bias", {out}} {}
  Tensor operator()(Tape& tape, const Tensor& x) { return ops::linear(tape, x, weight, &bias); }
  Parameter weight, bias;
};

struct Layer {
  Layer(const std::string& name, const Sizes& s)
      : heads(s.heads),
        qkv(name + ".qkv", s.width, 3 * s.width),
        out(name + ".out", s.width, s.width),
        up(name + ".up", s.width, 2 * s.width),
        down(name + ".down", 2 * s.width, s.width),
        block{name,
              {&qkv.weight, &qkv.bias, &out.weight, &out.bias, &up.weight, &up.bias, &down.weight,
               &down.bias}} {}

  Tensor operator()(Tape& tape, const Tensor& x) {
    const Tensor y = ops::attention(tape, qkv(tape, ops::layernorm(tape, x)),
                                    {.num_heads = heads, .causal = false});
    const Tensor sum = ops::add(tape, x, out(tape, y));
    const Tensor h = up(tape, ops::layernorm(tape, sum));
    const Tensor active = ops::unary<SquaredRelu>(
        tape, h, "squared_relu", {"squared_relu.forward", 2}, {"squared_relu.backward", 3});
    return ops::add(tape, sum, down(tape, active));
  }

  std::int64_t heads;
  Linear qkv, out, up, down;
  Block block;
};

struct Model {
  explicit Model(const Sizes& sizes) : s(sizes) {
    for (std::int64_t i = 0; i < s.layers; ++i)
      blocks.push_back(&layers.emplace_back("layers." + std::to_string(i), s).block);
  }

  /// Of images (B, C, H, W) the logits (B, classes).
  Tensor logits(Tape& tape, const Tensor& images) {
    const std::int64_t B = images.dim(0), C = s.channels, h = s.side / s.patch, p = s.patch;
    return tape.region(root, [&] {
      // The patches, one after the other, each with its channels.
      Tensor x = ops::permute(tape, images.reshape({B * C, h, p, h, p}), {0, 1, 3, 2, 4});
      x = ops::permute(tape, x.reshape({B, C, h * h, p * p}), {0, 2, 1, 3});
      x = patches(tape, x.reshape({B, h * h, C * p * p}));
      const Tensor token = ops::broadcast(tape, ops::parameter(tape, class_token), {B, 1, s.width});
      x = ops::concat(tape, {token, x}, 1);
      x = ops::add(tape, x, ops::broadcast(tape, ops::parameter(tape, positions), x.shape()));
      for (Layer& layer : layers) x = tape.region(layer.block, [&] { return layer(tape, x); });
      x = ops::slice(tape, x, /*dim=*/1, /*begin=*/0, /*count=*/1);
      return head(tape, ops::layernorm(tape, x.reshape({B, s.width})));
    });
  }

  Sizes s;
  std::int64_t num_patches = s.side / s.patch * (s.side / s.patch);
  Linear patches{"patches", s.channels* s.patch* s.patch, s.width};
  Parameter class_token{"class_token", {s.width}, Init::normal(0.02f)};
  Parameter positions{"positions", {num_patches + 1, s.width}, Init::normal(0.02f)};
  Linear head{"head", s.width, s.classes};
  Block root{"root",
             {&patches.weight, &patches.bias, &class_token, &positions, &head.weight, &head.bias}};
  std::deque<Layer> layers;  // parameters do not move
  std::vector<Block*> blocks;
};

}  // namespace vit

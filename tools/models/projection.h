// A linear layer as files of Hugging Face have it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/tape.h"
#include "ops/linear.h"

namespace tessera::tools {

/// A matrix (out, in), NAME.weight, and its NAME.bias, which may be missing.
struct Projection {
  Projection(const std::string& name, std::int64_t out, std::int64_t in, bool has_bias)
      : weight{.name = name + ".weight", .shape = {out, in}, .init = engine::Init::normal(0.02f)} {
    if (!has_bias) return;
    bias.emplace();
    bias->name = name + ".bias";
    bias->shape = {out};
  }

  engine::Tensor operator()(engine::Tape& tape, const engine::Tensor& x) {
    return ops::linear(tape, x, weight, bias ? &*bias : nullptr, ops::WeightLayout::kOutIn);
  }
  void add_to(engine::Block& block) {
    block.parameters.push_back(&weight);
    if (bias) block.parameters.push_back(&*bias);
  }

  engine::Parameter weight;
  std::optional<engine::Parameter> bias;
};

}  // namespace tessera::tools

// Low-rank adapters (Hu et al., arXiv:2106.09685) on a frozen model, as PEFT has them: a linear
// module y = W x + b becomes y + scale B A dropout(x), and A (r, in) and B (out, r) alone are
// trained. A begins as PEFT's does, uniform in [-1, 1] / sqrt(in), and B with zeros, so that a
// training begins with the model as it was. Their names are those of files of Hugging Face: module
// self_attn.q_proj of layers.0 has layers.0.self_attn.q_proj.lora_A.weight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tape.h"
#include "tools/models/model.h"

namespace tessera::tools {

/// A linear module of a layer, as files have it: one of several that may be packed here.
struct LinearModule {
  std::string name;  ///< in the layer: "self_attn.q_proj"
  std::int64_t out, in;
  bool is_usual = false;  ///< gets an adapter where no targets are named, as PEFT does
};

struct LoraOptions {
  std::int64_t rank = 0;  ///< r; 0: no adapters
  double alpha = 16;
  double dropout = 0;       ///< of what A takes, in [0, 1): a run's choice, no part of a model
  bool use_rslora = false;  ///< scale is alpha / sqrt(r), not alpha / r
  /// Of lora_targets(): modules of every layer.
  std::vector<std::string> targets = {};

  bool is_on() const { return rank > 0; }
  double scale() const;
};

/// The targets that a name in `asked` means, in the order of `modules`: all that are called so
/// ("c_proj" is two of a layer of GPT-2's), or that one alone ("mlp.c_proj"). "all-linear": all.
/// None asked for: the usual ones. Throws InvalidArgument naming the modules there are.
std::vector<std::string> lora_targets(std::span<const LinearModule> modules,
                                      std::span<const std::string> asked);

/// "q_proj,v_proj" -> the two. Empty: none.
std::vector<std::string> parse_lora_targets(std::string_view text);

/// Whether a parameter is an adapter's, by its name.
bool is_adapter(const engine::Parameter& p);
/// What `module`'s A and B are called: "layers.0.self_attn.q_proj" + these.
inline constexpr std::string_view kLoraA = ".lora_A.weight", kLoraB = ".lora_B.weight";

/// The adapters of a model.
class Lora {
 public:
  /// Adds adapters to each of `layers`, which have `modules`. Throws InvalidArgument naming what is
  /// out of range.
  Lora(LoraOptions options, std::vector<LinearModule> modules,
       std::span<engine::Block* const> layers);

  const LoraOptions& options() const { return options_; }
  /// Whether some of `modules` has one.
  bool has(std::initializer_list<std::string_view> modules) const;
  /// y (B, T, outs) of `modules` of layer `layer`, which are packed in it one after the other and
  /// all take x (B, T, in) -> y with what their adapters add; y itself if none has one.
  engine::Tensor add_to(engine::Tape& tape, std::size_t layer,
                        std::initializer_list<std::string_view> modules, const engine::Tensor& x,
                        const engine::Tensor& y, const Pass& pass);
  /// Operations of their matrix products over `tokens`, forward and backward (twice as many).
  double train_flops(std::int64_t tokens) const;

 private:
  struct Adapter {
    std::string name;
    engine::Parameter a, b;
  };
  engine::Tensor delta(engine::Tape& tape, Adapter& adapter, const engine::Tensor& x,
                       const Pass& pass) const;
  const LinearModule& module(std::string_view name) const;

  LoraOptions options_;
  std::vector<LinearModule> modules_;
  std::vector<std::map<std::string, Adapter, std::less<>>> layers_;  // by name of the module
};

}  // namespace tessera::tools

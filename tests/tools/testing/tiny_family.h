// A family of language models that is not bundled: a layer is two products, a token's next is
// told from it alone. One parameter is two tensors in files, and the head is its own.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/error.h"
#include "ops/add.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "tools/huggingface/config_file.h"
#include "tools/models/family.h"

namespace tessera::testing {

class TinyModel : public tools::LanguageModel {
 public:
  explicit TinyModel(const tools::ModelConfig& config)
      : config_(config),
        embed_(parameter("embed.weight", {config.vocab, config.dim})),
        head_(parameter("head.weight", {config.vocab, config.dim})),
        root_{"root", {&embed_, &head_}} {
    engine::require(config.dropout == 0, "[tiny] expected no model.dropout, got {}",
                    config.dropout);
    for (std::int64_t i = 0; i < config.layers; ++i) {
      layers_.push_back(std::make_unique<Layer>(i, config.dim, hidden()));
    }
  }

  std::vector<engine::Block*> blocks() override {
    std::vector<engine::Block*> blocks;
    for (const auto& layer : layers_) blocks.push_back(&layer->block);
    return blocks;
  }
  engine::Block* root() override { return &root_; }
  engine::Tensor loss(engine::Tape& tape, const std::vector<engine::Tensor>& batch,
                      const tools::Pass&) override {
    return tape.region(root_, [&] {
      return ops::linear_cross_entropy(tape, features(tape, batch.at(0)), head_, batch.at(1));
    });
  }

  std::int64_t max_tokens() const override { return config_.seq; }
  double train_flops(std::int64_t tokens) const override {
    return 6 * static_cast<double>(tokens * config_.dim) *
           static_cast<double>(2 * config_.layers * hidden() + config_.vocab);
  }
  engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens) override {
    return tape.no_grad([&] {
      return tape.region(root_, [&] {
        const engine::Tensor x = features(tape, tokens);
        const engine::Tensor last =
            x.slice((tokens.dim(1) - 1) * config_.dim, {tokens.dim(0), config_.dim});
        return ops::linear(tape, last, head_, nullptr, ops::WeightLayout::kOutIn);
      });
    });
  }

  engine::Tensor next_token_logits(engine::Tape& tape, const engine::Tensor& tokens,
                                   tools::KeyValueCache&) override {
    return next_token_logits(tape, tokens);  // what came before says nothing
  }

  tools::ModelLayout layout() const override {
    return {.family = "tiny",
            .title = "Tiny",
            .config_key = "width",
            .prefix = "model.",
            .head = "head.weight",
            .embedding = ""};
  }
  std::string config_text() const override {
    return fmt::format(
        R"({{"model_type":"tiny","width":{},"depth":{},"hidden":{},"positions":{},"vocab":{}}})",
        config_.dim, config_.layers, hidden(), config_.seq, config_.vocab);
  }
  std::vector<engine::TensorSpec> file_tensors(const engine::Parameter& p) const override {
    if (!p.name.ends_with(".up")) return LanguageModel::file_tensors(p);
    return {{p.name + ".first", {1, config_.dim}}, {p.name + ".rest", {hidden() - 1, config_.dim}}};
  }

 private:
  struct Layer {
    Layer(std::int64_t index, std::int64_t dim, std::int64_t hidden)
        : name(fmt::format("layer.{}", index)),
          up(parameter(name + ".up", {hidden, dim})),
          down(parameter(name + ".down", {dim, hidden})),
          block{name, {&up, &down}} {}
    std::string name;
    engine::Parameter up, down;
    engine::Block block;
  };

  static engine::Parameter parameter(std::string name, const engine::Shape& shape) {
    return {.name = std::move(name), .shape = shape, .init = engine::Init::normal(0.1f)};
  }
  std::int64_t hidden() const { return static_cast<std::int64_t>(config_.numbers.at("hidden")); }

  engine::Tensor features(engine::Tape& tape, const engine::Tensor& tokens) {
    engine::Tensor x = ops::embedding(tape, tokens, embed_);
    for (const auto& layer : layers_) {
      x = tape.region(layer->block, [&tape, x, &l = *layer] {
        const auto layout = ops::WeightLayout::kOutIn;
        const engine::Tensor h = ops::relu(tape, ops::linear(tape, x, l.up, nullptr, layout));
        return ops::add(tape, x, ops::linear(tape, h, l.down, nullptr, layout));
      });
    }
    return x;
  }

  tools::ModelConfig config_;
  engine::Parameter embed_, head_;
  engine::Block root_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

class TinyFamily : public tools::ModelFamily {
 public:
  TinyFamily() : ModelFamily("tiny", "Tiny") {}

  std::vector<Number> numbers() const override {
    return {{"hidden", "width between the products of a layer"}, {"scale"}};
  }
  std::vector<Preset> presets() const override {
    return {{"tiny",
             {.family = this,
              .layers = 2,
              .heads = 1,
              .dim = 8,
              .seq = 4,
              .vocab = 256,
              .numbers = {{"hidden", 12}, {"scale", 0.5}}}}};
  }
  std::unique_ptr<tools::LanguageModel> make(const tools::ModelConfig& config) const override {
    return std::make_unique<TinyModel>(config);
  }
  tools::ModelConfig read_config(const tools::FolderConfig& folder) const override {
    const tools::ModelConfig config = parsed(folder.file ? *folder.file : folder.saved.value());
    if (!folder.file || !folder.saved) return config;
    const auto saved = parsed(*folder.saved);
    tools::check_as_saved(config.layers == saved.layers, "tiny", "depth",
                          std::to_string(config.layers), std::to_string(saved.layers), folder);
    tools::check_as_saved(config.dim == saved.dim, "tiny", "width", std::to_string(config.dim),
                          std::to_string(saved.dim), folder);
    return config;
  }

 private:
  tools::ModelConfig parsed(const tools::ConfigText& text) const {
    const tools::ConfigFile file(text, "tiny");
    return {.family = this,
            .layers = file.integer("depth"),
            .heads = 1,
            .dim = file.integer("width"),
            .seq = file.integer("positions"),
            .vocab = file.integer("vocab"),
            .numbers = {{"hidden", static_cast<double>(file.integer("hidden"))}, {"scale", 0.5}}};
  }
};

/// The bundled ones, and this one after them.
inline const tools::Families& families_and_tiny() {
  static const TinyFamily tiny;
  static const tools::Families all = [] {
    tools::Families families = tools::families();
    families.push_back(&tiny);
    return families;
  }();
  return all;
}

}  // namespace tessera::testing

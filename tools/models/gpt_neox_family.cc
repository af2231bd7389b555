#include <memory>

#include "tools/huggingface/gpt_neox_files.h"
#include "tools/models/family.h"
#include "tools/models/gpt_neox.h"
#include "tools/models/rope_numbers.h"

namespace tessera::tools {
namespace {

class GptNeoxFamily : public ModelFamily {
 public:
  GptNeoxFamily()
      : ModelFamily(gpt_neox_layout(/*tied=*/false).family, gpt_neox_layout(/*tied=*/false).title) {
  }

  std::vector<Number> numbers() const override {
    std::vector<Number> numbers = {{"mlp_dim", "width between the matrices of an MLP"},
                                   {"norm_eps"},
                                   {"rotary_pct"},
                                   {"rope_theta"},
                                   {"parallel"},
                                   {"tied"},
                                   {"attention_bias"},
                                   {"tanh_gelu"}};
    for (Number& number : rope_numbers()) numbers.push_back(std::move(number));
    return numbers;
  }

  // Pythia (Biderman et al., arXiv:2304.01373).
  std::vector<Preset> presets() const override {
    const auto pythia = [&](const char* name, std::int64_t layers, std::int64_t heads,
                            std::int64_t dim, std::int64_t vocab) {
      return Preset{name, config_of({.layers = layers,
                                     .heads = heads,
                                     .dim = dim,
                                     .mlp_dim = 4 * dim,
                                     .positions = 2048,
                                     .vocab = vocab})};
    };
    return {pythia("pythia-70m", 6, 8, 512, 50'304), pythia("pythia-160m", 12, 12, 768, 50'304),
            pythia("pythia-410m", 24, 16, 1024, 50'304),
            pythia("pythia-1.4b", 24, 16, 2048, 50'304),
            pythia("pythia-6.9b", 32, 32, 4096, 50'432)};
  }

  std::unique_ptr<LanguageModel> make(const ModelConfig& config) const override {
    const auto& numbers = config.numbers;
    const auto is_set = [&](const char* key) { return numbers.at(key) != 0; };
    return std::make_unique<GptNeox>(
        GptNeoxFileConfig{.layers = config.layers,
                          .heads = config.heads,
                          .dim = config.dim,
                          .mlp_dim = config.whole("mlp_dim"),
                          .positions = config.seq,
                          .vocab = config.vocab,
                          .norm_eps = numbers.at("norm_eps"),
                          .rotation = {.theta = numbers.at("rope_theta"),
                                       .part = numbers.at("rotary_pct"),
                                       .scaling = rope_scaling_of(numbers)},
                          .parallel = is_set("parallel"),
                          .tied = is_set("tied"),
                          .attention_bias = is_set("attention_bias"),
                          .tanh_gelu = is_set("tanh_gelu"),
                          .hidden_dropout = config.dropout},
        config.cuda_attention);
  }

  ModelConfig read_config(const FolderConfig& folder) const override {
    return config_of(read_gpt_neox_config(folder));
  }

 private:
  ModelConfig config_of(const GptNeoxFileConfig& c) const {
    ModelConfig config{.family = this,
                       .layers = c.layers,
                       .heads = c.heads,
                       .dim = c.dim,
                       .seq = c.positions,
                       .vocab = c.vocab,
                       .numbers = {{"mlp_dim", static_cast<double>(c.mlp_dim)},
                                   {"norm_eps", c.norm_eps},
                                   {"rotary_pct", c.rotation.part},
                                   {"rope_theta", c.rotation.theta},
                                   {"parallel", c.parallel ? 1 : 0},
                                   {"tied", c.tied ? 1 : 0},
                                   {"attention_bias", c.attention_bias ? 1 : 0},
                                   {"tanh_gelu", c.tanh_gelu ? 1 : 0}}};
    config.numbers.merge(numbers_of(c.rotation.scaling));
    return config;
  }
};

}  // namespace

const ModelFamily& gpt_neox_family() {
  static const GptNeoxFamily family;
  return family;
}

}  // namespace tessera::tools

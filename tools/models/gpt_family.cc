#include <memory>

#include "tools/huggingface/config_file.h"
#include "tools/huggingface/gpt2_files.h"
#include "tools/models/family.h"
#include "tools/models/gpt.h"

namespace tessera::tools {
namespace {

constexpr const char* kNormEps = "norm_eps";

class GptFamily : public ModelFamily {
 public:
  GptFamily() : ModelFamily(gpt2_layout().family, gpt2_layout().title) {}

  std::vector<Number> numbers() const override { return {{kNormEps}}; }

  std::vector<Preset> presets() const override {
    std::vector<Preset> presets;
    for (const std::string& name : gpt_preset_names()) {
      presets.push_back({name, config_of(gpt_preset(name))});
    }
    return presets;
  }

  std::unique_ptr<LanguageModel> make(const ModelConfig& config) const override {
    return std::make_unique<Gpt>(gpt_config(config));
  }

  ModelConfig read_config(const FolderConfig& folder) const override {
    const Gpt2FileConfig file = read_gpt2_config(folder);
    return config_of({.layers = file.n_layer,
                      .heads = file.n_head,
                      .dim = file.n_embd,
                      .seq = file.n_positions,
                      .vocab = file.vocab_size,
                      .norm_eps = file.layer_norm_epsilon});
  }

 private:
  ModelConfig config_of(const GptConfig& gpt) const {
    return {.family = this,
            .layers = gpt.layers,
            .heads = gpt.heads,
            .dim = gpt.dim,
            .seq = gpt.seq,
            .vocab = gpt.vocab,
            .numbers = {{kNormEps, gpt.norm_eps}}};
  }
};

}  // namespace

GptConfig gpt_config(const ModelConfig& config) {
  return {.layers = config.layers,
          .heads = config.heads,
          .dim = config.dim,
          .seq = config.seq,
          .vocab = config.vocab,
          .dropout = config.dropout,
          .norm_eps = config.numbers.at(kNormEps),
          .cuda_attention = config.cuda_attention};
}

const ModelFamily& gpt_family() {
  static const GptFamily family;
  return family;
}

}  // namespace tessera::tools

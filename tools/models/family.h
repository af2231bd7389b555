// Families of language models: all that programs know of a model. A program finds a ModelConfig by
// a preset, or in files, and makes the model of it; it names none. To add a family is to derive
// from LanguageModel and ModelFamily, and to add a line to families().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/attention.h"
#include "tools/models/language_model.h"
#include "tools/models/lora.h"

namespace tessera::tools {

class ModelFamily;
struct FolderConfig;  // tools/huggingface/config_file.h

/// A model to be made: what a preset, options or files say of it.
struct ModelConfig {
  const ModelFamily* family = nullptr;
  std::int64_t layers = 0, heads = 0;
  std::int64_t dim = 0;                        ///< C
  std::int64_t seq = 0;                        ///< longest sequence
  std::int64_t vocab = 0;                      ///< V
  std::map<std::string, double> numbers = {};  ///< the family's own, all of ModelFamily::numbers()
  LoraOptions lora = {};                       ///< adapters; off: all is trained
  // A run's choices, of which texts of checkpoints say nothing.
  double dropout = 0;
  ops::CudaAttention cuda_attention = ops::CudaAttention::kAuto;

  /// Throws InvalidArgument naming what is out of range, or what the family does not have.
  std::unique_ptr<LanguageModel> make() const;
  /// How many elements the parameters of the model have, and those of them that are trained: where
  /// there are adapters, theirs alone.
  std::int64_t num_parameters() const;
  std::int64_t num_trained() const;
  /// Throws InvalidArgument unless this one of `numbers` is a whole number in [0, 2^24].
  std::int64_t whole(const std::string& number) const;
  /// As LanguageModel::train_flops().
  double train_flops(std::int64_t tokens) const;
};

class ModelFamily {
 public:
  struct Preset {
    std::string name;
    ModelConfig config;
  };
  /// What a ModelConfig has that not every family has.
  struct Number {
    std::string name;
    /// Of an option model.NAME that takes a whole number, in words that fit every family which has
    /// a number of that name; empty: presets and files alone say it.
    std::string help = {};
  };

  /// `name`: model_type of config.json, and what checkpoints say: "gpt2". `title`: "GPT-2".
  ModelFamily(std::string name, std::string title);
  virtual ~ModelFamily() = default;

  const std::string& name() const { return name_; }
  const std::string& title() const { return title_; }

  virtual std::vector<Number> numbers() const = 0;
  virtual std::vector<Preset> presets() const = 0;
  /// As ModelConfig::make(), of a config of this family.
  virtual std::unique_ptr<LanguageModel> make(const ModelConfig& config) const = 0;
  /// Throws IoError naming file and key for a model that we do not compute, or for config.json of
  /// another model than the weights.
  virtual ModelConfig read_config(const FolderConfig& folder) const = 0;

 private:
  std::string name_, title_;
};

using Families = std::vector<const ModelFamily*>;

/// Every family that is bundled; a folder that does not say its kind is of the first.
const Families& families();

/// "GPT-2", with "or" between several.
std::string titles(const Families& of = families());
/// The presets of all families, in order.
std::vector<std::string> preset_names(const Families& of = families());
/// Those that speed is measured on unless another is named, from small to large.
const std::vector<std::string>& measured_presets();
/// Throws InvalidArgument for a name that is none of preset_names().
ModelConfig preset_config(const std::string& name, const Families& of = families());
/// The model in `folder`, without dropout. Throws IoError naming file and key.
ModelConfig read_model_config(const std::string& folder, const Families& of = families());

/// As a checkpoint keeps it, {"model":"gpt2","layers":3,...}: without a run's choices.
std::string to_text(const ModelConfig& config);
/// Reads what to_text() writes. Throws IoError naming `path`, and the key.
ModelConfig parse_model_text(std::string_view text, std::string_view path,
                             const Families& of = families());

}  // namespace tessera::tools

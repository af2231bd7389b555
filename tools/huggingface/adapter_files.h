// Low-rank adapters in a folder as PEFT has them: adapter_config.json says what they are, and
// adapter_model.safetensors has two matrices for each module, A (r, in) and B (out, r), called
// "base_model.model.", the name of the module with its model's prefix, and ".lora_A.weight" or
// ".lora_B.weight".
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/safetensors.h"
#include "tools/huggingface/model_weights.h"

namespace tessera::tools {

inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";

/// What adapter_config.json says, under its names.
struct AdapterConfig {
  std::int64_t r = 0;
  double lora_alpha = 8, lora_dropout = 0;
  bool use_rslora = false;      ///< scale is alpha / sqrt(r), not alpha / r
  bool fan_in_fan_out = false;  ///< the base's matrices are (in, out)
  std::vector<std::string> target_modules = {};
  std::string base = {};  ///< base_model_name_or_path; empty: it says none

  bool operator==(const AdapterConfig&) const = default;
};

/// Whether `folder` has adapters.
bool has_adapter_config(const std::string& folder);
/// Throws IoError naming file and key: not there, not JSON, out of range, or what is not computed
/// here (biases, DoRA, modules that are saved whole, ranks by module, ...), of which a key that
/// nobody knows here must say nothing.
AdapterConfig read_adapter_config(const std::string& folder);
/// For PeftModel.from_pretrained.
std::string adapter_config_text(const AdapterConfig& config);

/// The weights in `folder` of adapters of a model whose own layout is `base`, by our names. Throws
/// IoError naming the file.
ModelWeights adapter_weights(const std::string& folder, const ModelLayout& base);

/// Writes such a folder. While files are replaced there is no adapter_config.json, unless it stays
/// as it is, so that nobody takes the weights of one for those of another.
class AdapterWriter {
 public:
  /// `tensors`: all, by our names, in the order of writing. Creates `folder` if need be. Throws
  /// IoError for a file that could not be replaced, and for a folder with a whole model.
  AdapterWriter(std::string folder, const ModelLayout& base, const AdapterConfig& config,
                std::span<const engine::TensorSpec> tensors);

  void write(std::string_view name, std::span<const float> data);
  /// Throws IoError.
  void finish();

 private:
  std::string folder_, prefix_, text_;
  std::optional<engine::SafetensorsWriter> weights_;
  std::optional<engine::AtomicFile> config_;
};

}  // namespace tessera::tools

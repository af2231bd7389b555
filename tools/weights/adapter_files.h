// The adapters of a model from and to a folder as PEFT has them, and added to its weights.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/io/safetensors.h"
#include "shard/fsdp.h"
#include "tools/huggingface/adapter_files.h"
#include "tools/models/family.h"
#include "tools/models/language_model.h"

namespace tessera::tools {

/// The adapters in `folder`, which are of a `base`, without dropout. Throws IoError naming file and
/// key, also for targets that `base` does not have.
LoraOptions read_lora(const std::string& folder, const ModelConfig& base);

/// Sets the adapters of `model`, which `fsdp` wraps. Each rank reads its part of the file and no
/// more. Not collective. Throws IoError that lists every tensor that is missing, unexpected or of
/// another shape.
void load_adapters(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder);

/// Of adapters in `folder`, written whole or not at all: see AdapterWriter. `base`: where the model
/// that they are for lies. Throws IoError if they cannot be written there: before training.
void check_can_save_adapters(const ModelConfig& config, const std::string& folder,
                             const std::string& base);
/// Collective over `world`, whose rank 0 writes. Throws IoError.
void save_adapters(shard::Fsdp& fsdp, const LanguageModel& model, const LoraOptions& options,
                   const std::string& folder, const std::string& base, comm::ProcessGroup& world);
/// Without Fsdp. `read` sets the values of a parameter.
using ReadParameter = std::function<void(const engine::Parameter& p, std::span<float> values)>;
void write_adapters(LanguageModel& model, const LoraOptions& options, const std::string& folder,
                    const std::string& base, const ReadParameter& read);

/// What adapters add to the weights of their model: scale B A, in f32.
class LoraDelta {
 public:
  /// For a `model` with adapters of such options, whose values `read` brings.
  LoraDelta(LanguageModel& model, const LoraOptions& options, const ReadParameter& read);
  /// For the adapters in `folder`, of a model of `base`. Throws IoError as read_lora() and
  /// load_adapters().
  LoraDelta(const std::string& folder, const ModelConfig& base);

  /// Adds to elements [first, first + values.size()) of a tensor of the model's files. Nothing is
  /// added to one without adapters.
  void add_to(const engine::TensorSpec& tensor, std::int64_t first, std::span<float> values) const;

 private:
  void add(LanguageModel& model, const LoraOptions& options, const ReadParameter& read);

  // An element of the tensor (rows, columns) gets the sum over r of left[r][row] right[r][column].
  struct Product {
    std::int64_t rows, columns;
    std::vector<float> left, right;  // (r, rows), scaled; (r, columns)
  };
  std::int64_t rank_ = 0;
  std::map<std::string, Product, std::less<>> products_;  // by name of the tensor
};

}  // namespace tessera::tools

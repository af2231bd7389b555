// GPT-2 checkpoints in the layout of Hugging Face transformers: a folder of config.json and
// model.safetensors. Tensor names here are without the "transformer." prefix ("wte.weight",
// "h.0.attn.c_attn.weight", ...); matrices are (in, out).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/safetensors.h"

namespace tessera::tools {

/// The key of the metadata of model.safetensors that holds the text of its config.json.
inline constexpr const char* kGpt2ConfigKey = "tessera.config.json";

/// What a save calls an older config.json while it replaces the model.
inline constexpr const char* kGpt2ReplacedConfig = "config.json.replaced";

/// The part of config.json that we honour, under its names.
struct Gpt2FileConfig {
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;
  std::int64_t n_positions = 1024;
  std::int64_t vocab_size = 50257;
  double layer_norm_epsilon = 1e-5;
  double resid_pdrop = 0.1;
  double embd_pdrop = 0.1;
  double attn_pdrop = 0.1;

  bool operator==(const Gpt2FileConfig&) const = default;
};

/// The files that model.safetensors.index.json of `folder` lists; none without one. Throws IoError
/// for an index that is malformed, or lists what does not lie in the folder itself.
std::vector<std::string> gpt2_shards(const std::string& folder);

/// Reads `folder`/config.json. Throws IoError naming the file and the key: not JSON, a size missing
/// or out of range, a model that is not GPT-2 or a variant that we do not compute (another
/// activation, an untied output matrix, scaled or upcast attention, quantised weights, ...), or not
/// what the weights were saved with. See [Note: two files, one model] for a save that was cut
/// short.
Gpt2FileConfig read_gpt2_config(const std::string& folder);

/// The weights of a folder: model.safetensors, or the shards that model.safetensors.index.json
/// lists, which must lie in the folder itself.
class Gpt2Weights {
 public:
  /// Validates all headers. Throws IoError naming file and tensor.
  explicit Gpt2Weights(const std::string& folder);

  /// Throws one IoError that lists every difference with its file and tensor: missing, unexpected,
  /// or of another shape or dtype. A separate output matrix (lm_head.weight) must equal the
  /// embedding. Attention mask buffers, which old versions saved, are ignored.
  void check_complete(std::span<const engine::TensorSpec> expected) const;

  /// Elements [first, first + out.size()) of a tensor, as f32. Throws IoError when the file has no
  /// tensor of that name and shape.
  void read(const engine::TensorSpec& tensor, std::int64_t first, std::span<float> out) const;
  /// A whole tensor; valid until the next call.
  std::span<const float> lookup(const engine::TensorSpec& tensor);

 private:
  struct Place {
    std::size_t file;
    const engine::TensorInfo* info;
  };
  void add_file(std::string path);
  void check_head() const;

  std::string folder_;
  std::vector<engine::SafetensorsFile> files_;
  std::map<std::string, Place, std::less<>> places_;  // by our names
  std::vector<float> buffer_;                         // of lookup()
};

// [Note: two files, one model]
// No system call replaces two files at once, and weights with the config of another model may load:
// the number of heads is in no shape. So that a folder is the old model or the new one, or is
// refused, whenever the process is killed or the power fails:
//
//   1. Both files are written and flushed under temporary names. The metadata of the weights holds
//      the text of their config.json.
//   2. An older config.json is renamed to config.json.replaced: without it nobody loads the folder.
//   3. The weights get their name.
//   4. config.json gets its name; config.json.replaced is removed.
//
// The folder is flushed after each, so no step reaches the disk before an earlier one. When the two
// configs are the same text only step 3 is taken. Between 2 and 4 read_gpt2_config() takes the copy
// in the weights, old or new: that is the model that they are. Older weights without a copy, which
// others wrote, are refused with the name of the config to put back. Where weights have a copy, a
// config.json that says another model is refused at all times.

/// Writes a folder that GPT2LMHeadModel.from_pretrained loads: the weights as they are given, one
/// at a time, and config.json. Both appear whole and together, or the old ones remain; when they
/// are there, shards and index of an older model are removed.
class Gpt2Writer {
 public:
  /// Creates `folder` if need be. `tensors`: all of the model, in the order of writing. Throws as
  /// SafetensorsWriter does.
  Gpt2Writer(std::string folder, const Gpt2FileConfig& config,
             std::span<const engine::TensorSpec> tensors);

  void write(std::string_view name, std::span<const float> data);
  /// Throws IoError; the older model then remains, or, when it is only the folder that could not be
  /// flushed, the new one is in place.
  void finish();

 private:
  std::string folder_;
  std::string config_text_;
  engine::SafetensorsWriter weights_;
  engine::AtomicFile config_;
};

}  // namespace tessera::tools

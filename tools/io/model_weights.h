// The weights of a model in a folder as Hugging Face transformers has them: model.safetensors, next
// to config.json. Families differ in the names of tensors.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/safetensors.h"

namespace tessera::tools {

/// What a family calls things in its files. Programs say names of tensors without the prefix.
struct ModelLayout {
  std::string family;      ///< model_type of config.json, and what errors begin with: "gpt2"
  std::string title;       ///< "GPT-2"
  std::string config_key;  ///< that every config.json of the family has: "n_embd"
  /// Whether a config.json without model_type may be of this family: as long as it has config_key.
  bool may_be_unnamed = false;
  std::string prefix;  ///< which names may have and, but for `head`, get in what is written
  std::string head = "lm_head.weight";  ///< the output matrix
  std::string embedding;  ///< what `head` must equal where files have it; empty: `head` is a weight
  /// Whether a tensor is one that older versions saved, and nobody needs. Null: none is.
  bool (*is_ignored)(std::string_view name) = nullptr;
};

/// The files that model.safetensors.index.json of `folder` lists; none without one. Throws IoError
/// for an index that is malformed, or lists what does not lie in the folder itself. `where`: what
/// errors begin with.
std::vector<std::string> model_shards(const std::string& folder, const std::string& where);

/// The weights of a folder: model.safetensors, or the shards that model.safetensors.index.json
/// lists, which must lie in the folder itself.
class ModelWeights {
 public:
  /// Validates all headers. Throws IoError naming file and tensor.
  ModelWeights(const std::string& folder, ModelLayout layout);

  /// Throws one IoError that lists every difference with its file and tensor: missing, unexpected,
  /// or of another shape or dtype; and for a tied head that is not the embedding.
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
  bool is_unneeded(std::string_view name, bool has_prefix) const;
  void check_head() const;

  std::string folder_;
  ModelLayout layout_;
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
// configs are the same text only step 3 is taken. Between 2 and 4 readers take the copy in
// the weights, old or new: that is the model that they are. Older weights without a copy, which
// others wrote, are refused with the name of the config to put back. Where weights have a copy, a
// config.json that says another model is refused at all times.

/// Writes a folder that transformers loads: the weights as they are given, one at a time, and
/// config.json. Both appear whole and together, or the old ones remain; when they are there, shards
/// and index of an older model are removed.
class ModelWriter {
 public:
  /// Creates `folder` if need be. `tensors`: all of the model, in the order of writing. Throws as
  /// SafetensorsWriter does, and for a folder whose config.json is of another family.
  ModelWriter(std::string folder, ModelLayout layout, std::string config_text,
              std::span<const engine::TensorSpec> tensors);

  void write(std::string_view name, std::span<const float> data);
  /// Throws IoError; the older model then remains, or, when it is only the folder that could not be
  /// flushed, the new one is in place.
  void finish();

 private:
  std::string folder_;
  ModelLayout layout_;
  std::string config_text_;
  engine::SafetensorsWriter weights_;
  engine::AtomicFile config_;
};

}  // namespace tessera::tools

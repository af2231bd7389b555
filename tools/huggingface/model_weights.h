// The weights of a model in a folder as Hugging Face transformers has them: model.safetensors, next
// to config.json. Families differ in the names of tensors.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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
  bool is_in_out = false;  ///< matrices are (in, out), not (out, in)
  std::string prefix;      ///< which names may have and, but for `head`, get in what is written
  std::string head = "lm_head.weight";  ///< the output matrix
  std::string embedding;  ///< what `head` must equal where files have it; empty: `head` is a weight
  /// Whether a tensor is one that older versions saved, and nobody needs. Null: none is.
  bool (*is_ignored)(std::string_view name) = nullptr;
};

/// The weights of a folder: model.safetensors, or the shards that its index lists.
class ModelWeights {
 public:
  /// Validates all headers. Throws IoError naming file and tensor, and for shards that were saved
  /// with different models.
  ModelWeights(const std::string& folder, ModelLayout layout);
  /// Of the one file at `path`, whose tensors are called as `layout` says. Throws as
  /// the constructor.
  static ModelWeights of_file(const std::string& path, ModelLayout layout);

  /// Throws one IoError that lists every difference with its file and tensor: missing, unexpected,
  /// or of another shape or dtype.
  void check_complete(std::span<const engine::TensorSpec> expected) const;

  /// Elements [first, first + out.size()) of a tensor, as f32. Throws IoError when the file has no
  /// tensor of that name and shape, and for elements of an embedding that those of a tied head, if
  /// files have one, do not equal.
  void read(const engine::TensorSpec& tensor, std::int64_t first, std::span<float> out) const;
  /// A whole tensor; valid until the next call.
  std::span<const float> lookup(const engine::TensorSpec& tensor);

 private:
  explicit ModelWeights(ModelLayout layout) : layout_(std::move(layout)) {}
  struct Place {
    std::size_t file;
    const engine::TensorInfo* info;
  };
  void add_file(std::string path);
  bool is_unneeded(std::string_view name, bool has_prefix) const;
  void check_copies() const;
  void check_head(std::int64_t first, std::span<const float> embedding) const;

  std::string folder_;
  ModelLayout layout_;
  std::vector<engine::SafetensorsFile> files_;
  std::map<std::string, Place, std::less<>> places_;  // by our names
  std::vector<float> buffer_;                         // of lookup()
};

}  // namespace tessera::tools

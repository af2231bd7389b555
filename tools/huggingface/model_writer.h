// Saves a model to a folder as Hugging Face transformers has them.
//
// [Note: several files, one model]
// No system call replaces several files at once, and weights with the config of another model may
// load: the number of heads is in no shape. So that a folder is the old model or the new one, or is
// refused, whenever the process is killed or the power fails:
//
//   1. All files are written and flushed under temporary names. The metadata of the weights, and of
//      each shard, holds the text of their config.json.
//   2. An older config.json is renamed to config.json.replaced: without it nobody loads the folder.
//   3. The weights get their name. Of shards the index does last: until then the older index leads
//      to the older model, and where the names of shards are those of older ones there is none
//      meanwhile, and nobody loads shards without. Then an older model.safetensors, which is loaded
//      as long as it is there, is removed. What the model keeps follows.
//   4. config.json gets its name; config.json.replaced is removed.
//
// The folder is flushed after each, so no step reaches the disk before an earlier one. When config
// and what is kept are there already, steps 2 and 4 are left out. Between 2 and 4 readers take the
// copy in the weights, old or new: that is the model that they are; who reads a tokenizer refuses a
// folder with a config.json.replaced (check_save_ended()). Older weights without a copy,
// which others wrote, are refused with the name of the config to put back. Where weights have a
// copy, a config.json that says another model is refused at all times.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/safetensors.h"
#include "tools/huggingface/kept_files.h"
#include "tools/huggingface/model_index.h"
#include "tools/huggingface/model_weights.h"

namespace tessera::tools {

/// Of --save.shard_gib: 0 for 0.
std::int64_t shard_nbytes_of(double gib);

struct SaveOptions {
  std::int64_t shard_nbytes = 0;  ///< of tensors in a file at most; 0: one file
  KeptFiles kept = {};            ///< of the folder that the model came from
};

/// Writes a folder that transformers loads: the weights as they are given, one at a time, and
/// config.json. All appear whole and together, or the old ones remain; when they are there, weights
/// of an older model are removed, and so are files of its tokenizer, if the new one has some.
class ModelWriter {
 public:
  /// Creates `folder` if need be. `tensors`: all of the model, in the order of writing. Throws as
  /// SafetensorsWriter does, for a folder whose config.json is of another family or that has an
  /// adapter, and for any file that could not be replaced.
  ModelWriter(std::string folder, ModelLayout layout, const std::string& config_text,
              std::span<const engine::TensorSpec> tensors, const SaveOptions& options = {});

  void write(std::string_view name, std::span<const float> data);
  /// Throws IoError; then the older model remains, or, where some of its shards were replaced, none
  /// that is loaded, or, when it is only the folder that could not be flushed, the new one is in
  /// place.
  void finish();

 private:
  bool is_only_weights() const;
  void place_all();
  void place_weights();
  void place_shards();

  std::string folder_;
  ModelLayout layout_;
  std::string config_text_;
  std::vector<ModelShard> shards_;
  std::vector<std::unique_ptr<engine::SafetensorsWriter>> weights_;  // of each shard
  std::size_t shard_ = 0, num_written_ = 0;                          // that is written, of it
  std::optional<engine::AtomicFile> index_;                          // of several shards
  std::vector<std::unique_ptr<engine::AtomicFile>> kept_;            // what is not there already
  std::vector<std::string> stale_, staying_;  // of another tokenizer: removed, or left alone
  engine::AtomicFile config_;
};

}  // namespace tessera::tools

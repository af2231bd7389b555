#include "tools/huggingface/model_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/adapter_files.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

std::string written_name(std::string_view name, const ModelLayout& layout) {
  return (name == layout.head ? "" : layout.prefix) + std::string(name);
}

std::vector<engine::TensorSpec> as_written(std::span<const engine::TensorSpec> tensors,
                                           const ModelLayout& layout) {
  std::vector<engine::TensorSpec> specs(tensors.begin(), tensors.end());
  for (engine::TensorSpec& tensor : specs) tensor.name = written_name(tensor.name, layout);
  return specs;
}

/// Many programs have a config.json: a save replaces that of a model of its family alone.
void check_replaceable(const std::string& folder, const ModelLayout& layout) {
  const std::string path = folder + "/config.json";
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return;
  bool is_model = false;
  try {
    const nlohmann::json config =
        engine::parse_json(engine::read_text_file(path, kMaxConfigNbytes), path);
    const nlohmann::json unnamed = layout.may_be_unnamed ? layout.family : "";
    is_model = config.is_object() && config.contains(layout.config_key) &&
               config.value("model_type", unnamed) == layout.family;
  } catch (const IoError&) {  // what cannot be read is not ours either
  }
  require<IoError>(is_model,
                   "[{}] expected a folder for a model, got one with a config.json that is of no "
                   "{} model and would be replaced: choose another folder ({})",
                   layout.family, layout.title, path);
}

/// So does it with what the model keeps.
void check_replaceable(const std::string& folder, const KeptFiles& kept,
                       const ModelLayout& layout) {
  for (const char* name : {"config.json", kReplacedConfig, "model.safetensors"}) {
    if (!is_missing(fmt::format("{}/{}", folder, name))) return;
  }
  if (!is_missing(fmt::format("{}/{}", folder, kModelIndex))) return;
  for (const auto& [name, content] : kept.files) {
    const std::string path = fmt::format("{}/{}", folder, name);
    require<IoError>(is_missing(path) || engine::holds_text(path, content),
                     "[{}] expected a folder for a model, got one with a {} that is of no model "
                     "and would be replaced: choose another folder ({})",
                     layout.family, name, path);
  }
}

const std::string& created(const std::string& folder, const ModelLayout& layout,
                           const KeptFiles& kept) {
  std::error_code error;
  std::vector<std::string> made;
  for (std::filesystem::path path = folder; !path.empty() && !std::filesystem::exists(path, error);
       path = path.parent_path()) {
    made.push_back(path.string());
  }
  std::filesystem::create_directories(folder, error);
  require<IoError>(!error, "[{}] expected to create a folder, got {} ({})", layout.family,
                   error.message(), folder);
  for (const std::string& path : made) engine::flush_folder_of(path);
  require<IoError>(
      !has_adapter_config(folder),
      "[{}] expected a folder for a model, got one with an adapter "
      "(adapter_config.json), which transformers would add to the model: choose another "
      "folder ({})",
      layout.family, folder);
  check_replaceable(folder, layout);
  check_replaceable(folder, kept, layout);
  return folder;
}

/// Waits for other savers to be done, but at most a minute, since one that hangs would cost this
/// model. Without a turn the worst is a folder that is refused when it is loaded.
void take_turn(const engine::FileDescriptor& folder, const std::string& path,
               const ModelLayout& layout) {
  constexpr int kPatience_s = 60;
  for (int i = 0; i < 100 * kPatience_s && engine::try_lock(folder) == engine::Lock::kHeldByAnother;
       ++i) {
    if (i == 100) {
      std::fprintf(stderr, "warning: [%s] another process holds the folder; waiting (%s)\n",
                   layout.family.c_str(), engine::escaped(path).c_str());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

/// False when there is no file `from`.
bool rename_if_there(const std::string& from, const std::string& to, const ModelLayout& layout) {
  const int error = ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
  require<IoError>(error == 0 || error == ENOENT, "[{}] expected to rename {} to {}, got {}",
                   layout.family, from, to, std::generic_category().message(error));
  return error == 0;
}

// The files of the weights that are in `folder`; last the index, by which what a process that dies
// leaves of them is found.
std::vector<std::string> weight_files(const std::string& folder, const ModelLayout& layout) {
  const std::string index = fmt::format("{}/{}", folder, kModelIndex);
  std::vector<std::string> names = {"model.safetensors"};
  if (is_missing(index)) return names;
  try {
    for (const auto& [name, tensors] : read_model_index(index, layout.family)) {
      if (name != names[0]) names.push_back(name);
    }
  } catch (const IoError&) {  // no model's that could be loaded
  }
  names.emplace_back(kModelIndex);
  return names;
}

/// Throws IoError if a file is still there.
void remove(const std::string& path, const ModelLayout& layout) {
  const int error = ::unlink(path.c_str()) == 0 ? 0 : errno;
  require<IoError>(error == 0 || error == ENOENT, "[{}] expected to remove {}, got {}",
                   layout.family, path, std::generic_category().message(error));
}

std::unique_ptr<engine::AtomicFile> flushed(const std::string& path, const std::string& text) {
  auto file = std::make_unique<engine::AtomicFile>(path);
  file->write(std::as_bytes(std::span(text)));
  file->flush();
  return file;
}

}  // namespace

std::int64_t shard_nbytes_of(double gib) {
  return gib == 0 ? 0 : std::max<std::int64_t>(1, static_cast<std::int64_t>(gib * 0x1p30));
}

ModelWriter::ModelWriter(std::string folder, ModelLayout layout, const std::string& config_text,
                         std::span<const engine::TensorSpec> tensors, const SaveOptions& options)
    : folder_(std::move(folder)),
      layout_(std::move(layout)),
      config_text_(with_kept_keys(config_text, options.kept.config_text)),
      shards_(cut_into_shards(as_written(tensors, layout_), options.shard_nbytes)),
      config_(created(folder_, layout_, options.kept) + "/config.json") {
  for (const ModelShard& shard : shards_) {
    weights_.push_back(std::make_unique<engine::SafetensorsWriter>(
        fmt::format("{}/{}", folder_, shard.name), shard.tensors,
        engine::SafetensorsMetadata{{"format", "pt"}, {kConfigKey, config_text_}}));
  }
  if (shards_.size() > 1) {
    const std::string text = model_index_text(shards_);
    index_.emplace(fmt::format("{}/{}", folder_, kModelIndex));
    index_->write(std::as_bytes(std::span(text)));
    index_->flush();
  }
  for (const auto& [name, content] : options.kept.files) {
    const std::string path = fmt::format("{}/{}", folder_, name);
    if (!engine::holds_text(path, content)) kept_.push_back(flushed(path, content));
  }
  const std::vector<std::string> others = other_kept_files(folder_, options.kept);
  (options.kept.files.empty() ? staying_ : stale_) = others;
}

void ModelWriter::write(std::string_view name, std::span<const float> data) {
  if (num_written_ == shards_[shard_].tensors.size() && shard_ + 1 < shards_.size()) {
    weights_[shard_]->flush();
    ++shard_;
    num_written_ = 0;
  }
  weights_[shard_]->write(written_name(name, layout_), data);
  ++num_written_;
}

void ModelWriter::finish() {
  for (; shard_ + 1 < shards_.size(); ++shard_) weights_[shard_]->flush();
  weights_.back()->flush();
  // Savers into one folder take turns, where it can be locked; the lock ends with the descriptor.
  const engine::FileDescriptor turn(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  take_turn(turn, folder_, layout_);
  std::vector<std::string> older = weight_files(folder_, layout_);
  if (is_only_weights()) {
    place_weights();
    ::unlink((folder_ + "/" + kReplacedConfig).c_str());  // of a save that was cut short
    engine::flush_folder_of(config_.path());
  } else {
    place_all();
  }
  for (const std::string& name : staying_) {
    std::fprintf(stderr, "warning: [%s] %s stays, of the model that was there (%s)\n",
                 layout_.family.c_str(), name.c_str(), engine::escaped(folder_).c_str());
  }
  for (const ModelShard& shard : shards_) std::erase(older, shard.name);
  if (index_) std::erase(older, std::string(kModelIndex));
  for (const std::string& name : older) {
    try {
      remove(fmt::format("{}/{}", folder_, name), layout_);
    } catch (const IoError& error) {  // it takes room, and nothing else
      std::fprintf(stderr, "warning: %s\n", engine::escaped(error.what()).c_str());
    }
  }
}

// Config and what is kept are there already.
bool ModelWriter::is_only_weights() const {
  return kept_.empty() && stale_.empty() && engine::holds_text(config_.path(), config_text_);
}

void ModelWriter::place_all() {
  const std::string& path = config_.path();
  const std::string replaced = folder_ + "/" + kReplacedConfig;
  config_.write(std::as_bytes(std::span(config_text_)));
  config_.flush();
  const bool moved = rename_if_there(path, replaced, layout_);
  try {
    engine::flush_folder_of(path);
    place_weights();
  } catch (...) {
    if (moved) rename_if_there(replaced, path, layout_);
    throw;
  }
  for (const auto& file : kept_) file->replace();
  for (const std::string& name : stale_) remove(fmt::format("{}/{}", folder_, name), layout_);
  const auto place = [&] {
    config_.replace();
    ::unlink(replaced.c_str());
  };
  try {
    engine::flush_folder_of(path);
  } catch (...) {
    place();  // the new model is whole, if perhaps not after a power cut
    throw;
  }
  place();
  engine::flush_folder_of(path);
}

void ModelWriter::place_weights() {
  if (index_) return place_shards();
  weights_[0]->replace();
}

void ModelWriter::place_shards() {
  const std::string& path = index_->path();
  const std::vector<std::string> older = weight_files(folder_, layout_);
  const bool meets = std::ranges::any_of(
      shards_, [&](const ModelShard& shard) { return std::ranges::count(older, shard.name) > 0; });
  const std::string aside = path + ".replaced";
  const bool moved = meets && rename_if_there(path, aside, layout_);
  if (moved) engine::flush_folder_of(path);
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    try {
      weights_[i]->replace();
    } catch (...) {
      if (moved && i == 0) rename_if_there(aside, path, layout_);
      throw;
    }
  }
  engine::flush_folder_of(path);
  index_->replace();
  remove(aside, layout_);  // of this save, or one that was cut short
  engine::flush_folder_of(path);
  remove(folder_ + "/model.safetensors", layout_);
}

}  // namespace tessera::tools

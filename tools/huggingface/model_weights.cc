#include "tools/huggingface/model_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_folder.h"
#include "tools/huggingface/model_index.h"
#include "tools/huggingface/tensor_names.h"

namespace tessera::tools {

using engine::fail;
using engine::IoError;
using engine::require;

ModelWeights::ModelWeights(const std::string& folder, ModelLayout layout)
    : folder_(folder), layout_(std::move(layout)) {
  const std::string whole = folder + "/model.safetensors";
  const std::string index = fmt::format("{}/{}", folder, kModelIndex);
  std::error_code ignored;
  if (std::filesystem::exists(whole, ignored) || !std::filesystem::exists(index, ignored)) {
    add_file(whole);
    return;
  }
  for (const auto& [name, tensors] : read_model_index(index, layout_.family)) {
    const std::string path = fmt::format("{}/{}", folder, name);
    require<IoError>(!is_missing(path),
                     "[{}] expected the files that {} lists, got no such file: fetch the model "
                     "again (tensor {}, {})",
                     layout_.family, kModelIndex, engine::shown_name(*tensors.begin()), path);
    add_file(path);
    const engine::SafetensorsFile& file = files_.back();
    for (const std::string& tensor : tensors) {
      require<IoError>(file.find(tensor) != nullptr,
                       "[{}] expected what the index lists, got no tensor {} ({})", layout_.family,
                       engine::shown_name(tensor), file.path());
    }
    require<IoError>(file.tensors().size() == tensors.size(),
                     "[{}] expected {} tensors as the index lists, got {} ({})", layout_.family,
                     tensors.size(), file.tensors().size(), file.path());
  }
  check_copies();
}

ModelWeights ModelWeights::of_file(const std::string& path, ModelLayout layout) {
  ModelWeights weights(std::move(layout));
  weights.folder_ = path;
  weights.files_.reserve(1);
  weights.add_file(path);
  return weights;
}

// Each shard that we save has the text of its model's config.json.
void ModelWeights::check_copies() const {
  const auto copy_in = [](const engine::SafetensorsFile& file) {
    const auto found = file.metadata().find(kConfigKey);
    return found == file.metadata().end() ? "" : found->second;
  };
  for (const engine::SafetensorsFile& file : files_) {
    require<IoError>(copy_in(file) == copy_in(files_[0]),
                     "[{}] expected shards of one model, got some that were saved with another "
                     "config.json ({}, {})",
                     layout_.family, files_[0].path(), file.path());
  }
}

void ModelWeights::add_file(std::string path) {
  files_.push_back(open_weights(std::move(path)));
  for (const engine::TensorInfo& info : files_.back().tensors()) {
    std::string_view name = info.name;
    if (name.starts_with(layout_.prefix)) name.remove_prefix(layout_.prefix.size());
    const auto [place, is_new] = places_.emplace(name, Place{files_.size() - 1, &info});
    require<IoError>(is_new, "[{}] expected each tensor once, got {} again ({}, {})",
                     layout_.family, engine::shown_name(name), files_[place->second.file].path(),
                     files_.back().path());
  }
}

void ModelWeights::check_complete(std::span<const engine::TensorSpec> expected) const {
  std::vector<engine::TensorSpec> missing, unexpected;
  std::vector<std::string> changed;
  std::set<std::string_view> names;
  for (const engine::TensorSpec& tensor : expected) {
    names.insert(tensor.name);
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) {
      missing.push_back(tensor);
      continue;
    }
    const engine::TensorInfo& info = *found->second.info;
    if (info.shape == tensor.shape && engine::SafetensorsFile::can_read(info)) continue;
    changed.push_back(fmt::format("{} is {} of {} and not {} of F32, BF16 or F16 in {}",
                                  engine::shown_name(tensor.name), engine::to_string(info.shape),
                                  info.dtype, engine::to_string(tensor.shape),
                                  files_[found->second.file].path()));
  }
  for (const auto& [name, place] : places_) {
    // What all names have before the model's, unneeded ones have too.
    if (names.contains(name) || is_unneeded(name, /*has_prefix=*/!missing.empty())) continue;
    unexpected.push_back({name, place.info->shape});
  }
  const std::size_t num = missing.size() + unexpected.size() + changed.size();
  if (num > 0) {
    constexpr std::size_t kMostChanged = 4;
    std::vector<std::string> lines = name_differences(missing, unexpected, layout_.prefix);
    if (changed.size() > kMostChanged) {
      const std::size_t num_more = changed.size() - kMostChanged;
      changed.resize(kMostChanged);
      changed.push_back(fmt::format("and {} more", num_more));
    }
    lines.insert(lines.end(), changed.begin(), changed.end());
    fail<IoError>("[{}] expected the {} tensors of the model, got {} difference{} ({}):\n  {}",
                  layout_.family, expected.size(), num, num == 1 ? "" : "s", folder_,
                  engine::join(lines, "\n  "));
  }
}

bool ModelWeights::is_unneeded(std::string_view name, bool has_prefix) const {
  for (;;) {  // no recursion: a file may have a name of any length
    if (!layout_.embedding.empty() && name == layout_.head) return true;
    if (layout_.is_ignored != nullptr && layout_.is_ignored(name)) return true;
    const std::size_t dot = has_prefix ? name.find('.') : std::string_view::npos;
    if (dot == std::string_view::npos) return false;
    name.remove_prefix(dot + 1);
  }
}

// `embedding`: elements from `first` on.
void ModelWeights::check_head(std::int64_t first, std::span<const float> embedding) const {
  const auto found = places_.find(layout_.head);
  if (found == places_.end()) return;
  const auto& [file, head] = found->second;
  bool equal = head->shape == places_.find(layout_.embedding)->second.info->shape;
  std::vector<float> part(std::min<std::size_t>(embedding.size(), 1 << 16));
  while (equal && !embedding.empty()) {
    const auto values = std::span(part).first(std::min(part.size(), embedding.size()));
    files_[file].read(*head, first, values);
    equal = std::memcmp(values.data(), embedding.data(), values.size_bytes()) == 0;
    first += std::ssize(values);
    embedding = embedding.subspan(values.size());
  }
  require<IoError>(
      equal, "[{}] expected an output matrix that is the embedding {}, got another (tensor {}, {})",
      layout_.family, layout_.embedding, engine::shown_name(head->name), files_[file].path());
}

void ModelWeights::read(const engine::TensorSpec& tensor, std::int64_t first,
                        std::span<float> out) const {
  const auto found = places_.find(tensor.name);
  require<IoError>(found != places_.end(), "[{}] expected tensor {}, got none ({})", layout_.family,
                   engine::shown_name(tensor.name), folder_);
  const auto& [file, info] = found->second;
  require<IoError>(info->shape == tensor.shape, "[{}] expected {}, got {} (tensor {}, {})",
                   layout_.family, engine::to_string(tensor.shape), engine::to_string(info->shape),
                   engine::shown_name(tensor.name), files_[file].path());
  files_[file].read(*info, first, out);
  if (tensor.name == layout_.embedding) check_head(first, out);
}

std::span<const float> ModelWeights::lookup(const engine::TensorSpec& tensor) {
  buffer_.resize(static_cast<std::size_t>(engine::numel(tensor.shape)));
  read(tensor, 0, buffer_);
  return buffer_;
}

}  // namespace tessera::tools

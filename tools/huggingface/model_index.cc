#include "tools/huggingface/model_index.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/model_folder.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;
using nlohmann::json;

namespace {

constexpr std::int64_t kMaxIndexNbytes = 1 << 26;

std::int64_t nbytes_of(const engine::TensorSpec& tensor) {
  return engine::numel(tensor.shape) * engine::size_of(tensor.dtype);
}

}  // namespace

ModelIndex read_model_index(const std::string& path, const std::string& where) {
  const std::string text = engine::read_text_file(path, kMaxIndexNbytes);
  check_is_json(text, path);
  json index = engine::parse_json(text, path);
  const engine::JsonEnd end(index);
  require<IoError>(
      index.is_object() && index.contains("weight_map") && index.at("weight_map").is_object(),
      "[{}] expected an object weight_map, got none ({})", where, path);
  ModelIndex files;
  for (const auto& [tensor, value] : index.at("weight_map").items()) {
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    require<IoError>(file.ends_with(".safetensors") && !file.starts_with('.') &&
                         file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
                     "[{}] expected a .safetensors file of the same folder, got {} (tensor {}, {})",
                     where, engine::shown_name(value.dump()), engine::shown_name(tensor), path);
    files[file].insert(tensor);
  }
  return files;
}

std::vector<ModelShard> cut_into_shards(std::span<const engine::TensorSpec> tensors,
                                        std::int64_t max_nbytes) {
  std::vector<ModelShard> shards(1);
  std::int64_t nbytes = 0;  // of the last
  for (const engine::TensorSpec& tensor : tensors) {
    const std::int64_t more = nbytes_of(tensor);
    if (max_nbytes > 0 && !shards.back().tensors.empty() && more > max_nbytes - nbytes) {
      shards.emplace_back();
      nbytes = 0;
    }
    shards.back().tensors.push_back(tensor);
    nbytes += more;
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
  return shards;
}

std::string model_index_text(std::span<const ModelShard> shards) {
  json index = {{"metadata", json::object()}, {"weight_map", json::object()}};
  const engine::JsonEnd end(index);
  std::int64_t numel = 0, nbytes = 0;
  for (const ModelShard& shard : shards) {
    for (const engine::TensorSpec& tensor : shard.tensors) {
      index["weight_map"][tensor.name] = shard.name;
      numel += engine::numel(tensor.shape);
      nbytes += nbytes_of(tensor);
    }
  }
  index["metadata"] = {{"total_parameters", numel}, {"total_size", nbytes}};
  return index.dump(2) + "\n";
}

}  // namespace tessera::tools

#include "tools/huggingface/config_file.h"

#include <algorithm>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/model_folder.h"
#include "tools/huggingface/model_index.h"

namespace tessera::tools {

using engine::fail;
using engine::IoError;
using nlohmann::json;

namespace {

json parsed(const ConfigText& config, const std::string& where) {
  check_is_json(config.text, config.path);
  json all = engine::parse_json(config.text, config.path);
  engine::require<IoError>(all.is_object(), "[{}] expected an object, got otherwise ({})", where,
                           config.path);
  return all;
}

/// The copy in the weights, of shards the first, if there is one.
std::optional<ConfigText> config_of_weights(const std::string& folder) {
  std::string path = folder + "/model.safetensors";
  const std::string index = folder + "/" + std::string(kModelIndex);
  if (is_missing(path) && !is_missing(index)) {
    const ModelIndex shards = read_model_index(index, "model");
    if (shards.empty()) return std::nullopt;
    path = folder + "/" + shards.begin()->first;
  }
  if (is_missing(path)) return std::nullopt;
  const engine::SafetensorsFile weights = open_weights(path);
  const auto copy = weights.metadata().find(kConfigKey);
  if (copy == weights.metadata().end()) return std::nullopt;
  return ConfigText{copy->second, path};
}

}  // namespace

FolderConfig read_folder_config(const std::string& folder) {
  check_model_folder(folder);
  const std::string path = folder + "/config.json";
  FolderConfig config{.folder = folder, .file = {}, .saved = config_of_weights(folder)};
  if (config.saved && is_missing(path)) return config;
  engine::require<IoError>(
      !is_missing(path) || is_missing(folder + "/" + kReplacedConfig),
      "[model] expected {}, got none: a save was cut short before it replaced the "
      "weights; renaming {} to config.json restores the older model ({})",
      path, kReplacedConfig, folder);
  config.file = {engine::read_text_file(path, kMaxConfigNbytes), path};
  return config;
}

void check_save_ended(const std::string& folder) {
  engine::require<IoError>(is_missing(folder + "/" + kReplacedConfig),
                           "[model] expected the files of one model, got {}: a save was cut short, "
                           "and its tokenizer may "
                           "be that of the model before; save the model again ({})",
                           kReplacedConfig, folder);
}

void check_as_saved(bool is_same, const std::string& where, const char* key,
                    const std::string& file, const std::string& saved, const FolderConfig& folder) {
  engine::require<IoError>(
      is_same,
      "[{}] expected {} of {} in config.json, as the weights were saved with, got "
      "{}: files of two models, or of a save that was cut short ({})",
      where, key, saved, file, folder.folder);
}

ConfigFile::ConfigFile(const ConfigText& config, std::string where)
    : path_(config.path), where_(std::move(where)), json_(parsed(config, where_)) {}

ConfigFile::ConfigFile(std::string path, std::string where, json own)
    : path_(std::move(path)), where_(std::move(where)), json_(std::move(own)) {}

void ConfigFile::require_there(const char* key) const {
  engine::require<IoError>(has(key), "[{}] expected key {}, got none ({})", where_, key, path_);
}

std::int64_t ConfigFile::integer(const char* key) const {
  constexpr std::int64_t kMax = std::int64_t{1} << 24;
  require_there(key);
  const json& value = json_.at(key);
  engine::require<IoError>(value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                               value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMax),
                           "[{}] expected {} in [1, {}], got {} ({})", where_, key, kMax,
                           engine::excerpt(value.dump()), path_);
  return value.get<std::int64_t>();
}

double ConfigFile::number(const char* key, double unless_there, double min, double end) const {
  if (!has(key)) return unless_there;
  const json& value = json_.at(key);
  engine::require<IoError>(
      value.is_number() && value.get<double>() >= min && value.get<double>() < end,
      "[{}] expected {} in [{}, {}), got {} ({})", where_, key, min, end,
      engine::excerpt(value.dump()), path_);
  return value.get<double>();
}

double ConfigFile::required_number(const char* key, double min, double end) const {
  require_there(key);
  return number(key, min, min, end);
}

void ConfigFile::require(bool ok, const char* key, std::string_view what) const {
  engine::require<IoError>(ok, "[{}] expected {} to be {}, got {} ({})", where_, key, what,
                           has(key) ? engine::excerpt(json_.at(key).dump()) : "none", path_);
}

ConfigFile ConfigFile::object(const char* key) const {
  require_there(key);
  const json& value = json_.at(key);
  engine::require<IoError>(value.is_object(), "[{}] expected {} to be an object, got {} ({})",
                           where_, key, engine::excerpt(value.dump()), path_);
  return {path_ + ": " + key, where_, value};
}

void ConfigFile::all_of(const char* key, const json& supported) const {
  if (!has(key) || is_null(key)) return;
  const json& values = json_.at(key);
  const bool is_good = values.is_array() && std::ranges::all_of(values, [&](const json& value) {
                         return value == supported;
                       });
  engine::require<IoError>(is_good, "[{}] expected {} of {} alone, got {} ({})", where_, key,
                           supported.dump(), engine::excerpt(values.dump()), path_);
}

json ConfigFile::one_of(const char* key, std::initializer_list<json> supported) const {
  if (!has(key)) return *supported.begin();
  if (std::ranges::count(supported, json_.at(key)) > 0) return json_.at(key);
  std::string list;
  for (const json& value : supported) list += (list.empty() ? "" : " or ") + value.dump();
  fail<IoError>("[{}] expected {} to be {}, got {} ({})", where_, key, list,
                engine::excerpt(json_.at(key).dump()), path_);
}

std::string model_type(const ConfigText& config) {
  const json all = parsed(config, "model");
  const auto found = all.find("model_type");
  if (found == all.end()) return "";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

}  // namespace tessera::tools

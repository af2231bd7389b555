#include "tools/huggingface/adapter_files.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_folder.h"

namespace tessera::tools {

using engine::IoError;
using engine::json_literal;
using engine::require;

namespace {

constexpr const char* kPrefix = "base_model.model.";

// Keys that say nothing of what adapters compute, or are read below.
const std::set<std::string>& harmless() {
  static const std::set<std::string> kKeys = {"auto_mapping",
                                              "base_model_name_or_path",
                                              "bias",
                                              "fan_in_fan_out",
                                              "inference_mode",
                                              "init_lora_weights",
                                              "lora_alpha",
                                              "lora_dropout",
                                              "megatron_core",
                                              "peft_type",
                                              "peft_version",
                                              "qalora_group_size",
                                              "r",
                                              "revision",
                                              "target_modules",
                                              "task_type",
                                              "use_rslora"};
  return kKeys;
}

bool says_nothing(const nlohmann::json& value) {
  return value.is_null() || value == false || value == 0 ||
         ((value.is_array() || value.is_object() || value.is_string()) && value.empty());
}

std::vector<std::string> targets_of(const ConfigFile& file, const nlohmann::json& value) {
  constexpr const char* kKey = "target_modules";
  if (value == "all-linear") return {"all-linear"};
  bool is_list = value.is_array() && !value.empty();
  for (const nlohmann::json& name : value) is_list &= name.is_string();
  file.require(is_list, kKey, "a list of names, or \"all-linear\"");
  return value.get<std::vector<std::string>>();
}

std::string path_of(const std::string& folder, const char* name) {
  return fmt::format("{}/{}", folder, name);
}

}  // namespace

bool has_adapter_config(const std::string& folder) {
  std::error_code ignored;
  return std::filesystem::exists(path_of(folder, kAdapterConfig), ignored);
}

AdapterConfig read_adapter_config(const std::string& folder) {
  const std::string path = path_of(folder, kAdapterConfig);
  require<IoError>(has_adapter_config(folder),
                   "[lora] expected a folder of PEFT's with {}, got none ({})", kAdapterConfig,
                   folder);
  const ConfigText text{engine::read_text_file(path, kMaxConfigNbytes), path};
  const ConfigFile file(text, "lora");
  const nlohmann::json all = engine::parse_json(text.text, path);
  file.one_of("peft_type", {"LORA"});
  file.one_of("bias", {"none"});
  file.one_of("init_lora_weights", {true, false, "gaussian"});
  for (const auto& [key, value] : all.items()) {
    require<IoError>(harmless().contains(key) || says_nothing(value),
                     "[lora] expected adapters without {}, which is not computed here, got {} ({})",
                     engine::excerpt(key, 60), engine::excerpt(value.dump(), 60), path);
  }
  AdapterConfig config;
  config.r = file.integer("r");
  file.require(config.r <= 1 << 16, "r", "at most 65536");
  config.lora_alpha = file.required_number("lora_alpha", 1e-30, 1e30);
  config.lora_dropout = file.number("lora_dropout", 0, 0, 1);
  config.use_rslora = file.one_of("use_rslora", {false, true}).get<bool>();
  config.fan_in_fan_out = file.one_of("fan_in_fan_out", {false, true}).get<bool>();
  config.target_modules = targets_of(
      file, all.contains("target_modules") ? all.at("target_modules") : nlohmann::json());
  if (const auto base = all.find("base_model_name_or_path");
      base != all.end() && !base->is_null()) {
    file.require(base->is_string(), "base_model_name_or_path", "a text");
    config.base = base->get<std::string>();
  }
  return config;
}

std::string adapter_config_text(const AdapterConfig& config) {
  std::vector<std::string> targets;
  for (const std::string& name : config.target_modules) targets.push_back(json_literal(name));
  const auto number = [](double value) {
    return value == std::trunc(value) && std::abs(value) < 1e15
               ? json_literal(static_cast<std::int64_t>(value))
               : json_literal(value);
  };
  const std::pair<const char*, std::string> keys[] = {
      {"alpha_pattern", "{}"},
      {"base_model_name_or_path", config.base.empty() ? "null" : json_literal(config.base)},
      {"bias", "\"none\""},
      {"fan_in_fan_out", json_literal(config.fan_in_fan_out)},
      {"inference_mode", "true"},
      {"init_lora_weights", "true"},
      {"lora_alpha", number(config.lora_alpha)},
      {"lora_dropout", number(config.lora_dropout)},
      {"modules_to_save", "null"},
      {"peft_type", "\"LORA\""},
      {"r", json_literal(config.r)},
      {"rank_pattern", "{}"},
      {"target_modules", "[" + engine::join(targets, ", ") + "]"},
      {"task_type", "\"CAUSAL_LM\""},
      {"use_dora", "false"},
      {"use_rslora", json_literal(config.use_rslora)},
  };
  std::string text;
  for (const auto& [key, value] : keys)
    text += fmt::format("{}  \"{}\": {}", text.empty() ? "{\n" : ",\n", key, value);
  return text + "\n}\n";
}

ModelWeights adapter_weights(const std::string& folder, const ModelLayout& base) {
  ModelLayout layout;
  layout.family = "lora";
  layout.prefix = kPrefix + base.prefix;
  layout.head.clear();
  return ModelWeights::of_file(path_of(folder, kAdapterWeights), std::move(layout));
}

AdapterWriter::AdapterWriter(std::string folder, const ModelLayout& base,
                             const AdapterConfig& config,
                             std::span<const engine::TensorSpec> tensors)
    : folder_(std::move(folder)),
      prefix_(kPrefix + base.prefix),
      text_(adapter_config_text(config)) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  require<IoError>(!error, "[lora] expected a folder that can be made, got {} ({})",
                   error.message(), folder_);
  require<IoError>(is_missing(folder_ + "/config.json"),
                   "[lora] expected a folder for adapters, got one with a whole model, which "
                   "programs would load instead: choose another folder ({})",
                   folder_);
  std::vector<engine::TensorSpec> named(tensors.begin(), tensors.end());
  for (engine::TensorSpec& tensor : named) tensor.name = prefix_ + tensor.name;
  weights_.emplace(path_of(folder_, kAdapterWeights), std::move(named));
  if (!engine::holds_text(path_of(folder_, kAdapterConfig), text_))
    config_.emplace(path_of(folder_, kAdapterConfig));
}

void AdapterWriter::write(std::string_view name, std::span<const float> data) {
  weights_->write(prefix_ + std::string(name), data);
}

void AdapterWriter::finish() {
  weights_->flush();
  if (config_) {
    config_->write(std::as_bytes(std::span(text_)));
    config_->flush();
    std::error_code error;
    std::filesystem::remove(config_->path(), error);
    require<IoError>(!error, "[lora] expected a file that can be replaced, got {} ({})",
                     error.message(), config_->path());
    engine::flush_folder_of(config_->path());
  }
  weights_->replace();
  if (config_) config_->replace();
  engine::flush_folder_of(path_of(folder_, kAdapterWeights));
}

}  // namespace tessera::tools

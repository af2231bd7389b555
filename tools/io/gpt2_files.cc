#include "tools/io/gpt2_files.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr std::string_view kPrefix = "transformer.";  // also in gpt2_writer.cc
constexpr std::int64_t kMaxConfigNbytes = 1 << 20;
constexpr std::int64_t kMaxIndexNbytes = 1 << 26;

/// config.json with typed access; errors name the file and the key.
class Config {
 public:
  Config(std::string_view text, std::string path)
      : path_(std::move(path)), json_(engine::parse_json(text, path_)) {
    require<IoError>(json_.is_object(), "[gpt2] expected an object, got otherwise ({})", path_);
  }

  bool has(const char* key) const { return json_.contains(key); }

  std::int64_t integer(const char* key) const {
    constexpr std::int64_t kMax = std::int64_t{1} << 24;
    require<IoError>(has(key), "[gpt2] expected key {}, got none ({})", key, path_);
    const json& value = json_.at(key);
    require<IoError>(value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                         value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMax),
                     "[gpt2] expected {} in [1, {}], got {} ({})", key, kMax,
                     engine::excerpt(value.dump()), path_);
    return value.get<std::int64_t>();
  }

  /// In [min, 1): `unless_there` when the key is missing.
  double fraction(const char* key, double unless_there, double min) const {
    if (!has(key)) return unless_there;
    const json& value = json_.at(key);
    require<IoError>(value.is_number() && value.get<double>() >= min && value.get<double>() < 1,
                     "[gpt2] expected {} in [{}, 1), got {} ({})", key, min,
                     engine::excerpt(value.dump()), path_);
    return value.get<double>();
  }

  /// The key may be missing; a value must be one of `supported`.
  void check(const char* key, std::initializer_list<json> supported) const {
    if (!has(key) || std::ranges::count(supported, json_.at(key)) > 0) return;
    std::string list;
    for (const json& value : supported) list += (list.empty() ? "" : " or ") + value.dump();
    fail<IoError>("[gpt2] expected {} to be {}, got {} ({})", key, list,
                  engine::excerpt(json_.at(key).dump()), path_);
  }

 private:
  std::string path_;
  json json_;
};

bool is_mask_buffer(std::string_view name) {
  return name.starts_with("h.") &&
         (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

/// The files that an index lists, each of which must be a plain name.
std::map<std::string, std::set<std::string>> read_index(const std::string& path) {
  const json index = engine::parse_json(engine::read_text_file(path, kMaxIndexNbytes), path);
  require<IoError>(
      index.is_object() && index.contains("weight_map") && index.at("weight_map").is_object(),
      "[gpt2] expected an object weight_map, got none ({})", path);
  std::map<std::string, std::set<std::string>> files;
  for (const auto& [tensor, value] : index.at("weight_map").items()) {
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    require<IoError>(
        file.ends_with(".safetensors") && !file.starts_with('.') &&
            file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
        "[gpt2] expected a .safetensors file of the same folder, got {} (tensor {}, {})",
        engine::shown_name(value.dump()), engine::shown_name(tensor), path);
    files[file].insert(tensor);
  }
  return files;
}

bool is_missing(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::status(path, ignored).type() == std::filesystem::file_type::not_found;
}

Gpt2FileConfig parse_config(std::string_view text, const std::string& path) {
  const Config file(text, path);
  Gpt2FileConfig config;
  file.check("model_type", {"gpt2"});
  config.n_layer = file.integer("n_layer");
  config.n_head = file.integer("n_head");
  config.n_embd = file.integer("n_embd");
  config.n_positions = file.integer(file.has("n_positions") ? "n_positions" : "n_ctx");
  config.vocab_size = file.integer("vocab_size");
  require<IoError>(config.n_embd % config.n_head == 0,
                   "[gpt2] expected n_embd to be a multiple of n_head, got {} and {} ({})",
                   config.n_embd, config.n_head, path);
  constexpr double kSmallest = 1e-30;
  config.layer_norm_epsilon =
      file.fraction("layer_norm_epsilon", config.layer_norm_epsilon, kSmallest);
  config.resid_pdrop = file.fraction("resid_pdrop", config.resid_pdrop, 0);
  config.embd_pdrop = file.fraction("embd_pdrop", config.embd_pdrop, 0);
  config.attn_pdrop = file.fraction("attn_pdrop", config.attn_pdrop, 0);
  // Two names of one function, the tanh approximation.
  file.check("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  file.check("n_inner", {nullptr, 4 * config.n_embd});
  file.check("tie_word_embeddings", {true});
  file.check("scale_attn_weights", {true});
  file.check("scale_attn_by_inverse_layer_idx", {false});
  file.check("reorder_and_upcast_attn", {false});
  file.check("add_cross_attention", {false});
  file.check("quantization_config", {nullptr});
  return config;
}

/// The config that the weights at `path` were saved with, if they say.
std::optional<Gpt2FileConfig> config_of_weights(const std::string& path) {
  if (is_missing(path)) return std::nullopt;
  const engine::SafetensorsFile weights(path);
  const auto copy = weights.metadata().find(kGpt2ConfigKey);
  if (copy == weights.metadata().end()) return std::nullopt;
  return parse_config(copy->second, path);
}

/// Dropout is the reader's to change; the rest makes the weights the model that they are.
void check_same_model(const Gpt2FileConfig& config, const Gpt2FileConfig& saved,
                      const std::string& folder) {
  const auto check = [&](const char* key, auto got, auto expected) {
    require<IoError>(got == expected,
                     "[gpt2] expected {} of {} in config.json, as model.safetensors was saved "
                     "with, got {}: files of two models, or of a save that was cut short ({})",
                     key, expected, got, folder);
  };
  check("n_layer", config.n_layer, saved.n_layer);
  check("n_head", config.n_head, saved.n_head);
  check("n_embd", config.n_embd, saved.n_embd);
  check("n_positions", config.n_positions, saved.n_positions);
  check("vocab_size", config.vocab_size, saved.vocab_size);
  check("layer_norm_epsilon", config.layer_norm_epsilon, saved.layer_norm_epsilon);
}

}  // namespace

std::vector<std::string> gpt2_shards(const std::string& folder) {
  const std::string index = folder + "/model.safetensors.index.json";
  std::vector<std::string> names;
  if (is_missing(index)) return names;
  for (const auto& [name, tensors] : read_index(index)) names.push_back(name);
  return names;
}

Gpt2FileConfig read_gpt2_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const std::string replaced = folder + "/" + kGpt2ReplacedConfig;
  const auto saved = config_of_weights(folder + "/model.safetensors");
  if (is_missing(path)) {
    if (saved) return *saved;
    require<IoError>(is_missing(replaced),
                     "[gpt2] expected {}, got none: a save was cut short before it replaced the "
                     "weights; renaming {} to config.json restores the older model ({})",
                     path, kGpt2ReplacedConfig, folder);
  }
  const Gpt2FileConfig config = parse_config(engine::read_text_file(path, kMaxConfigNbytes), path);
  if (saved) check_same_model(config, *saved, folder);
  return config;
}

Gpt2Weights::Gpt2Weights(const std::string& folder) : folder_(folder) {
  const std::string whole = folder + "/model.safetensors", index = whole + ".index.json";
  std::error_code ignored;
  if (std::filesystem::exists(whole, ignored) || !std::filesystem::exists(index, ignored)) {
    add_file(whole);
    return;
  }
  for (const auto& [name, tensors] : read_index(index)) {
    add_file(fmt::format("{}/{}", folder, name));
    const engine::SafetensorsFile& file = files_.back();
    for (const std::string& tensor : tensors) {
      require<IoError>(file.find(tensor) != nullptr,
                       "[gpt2] expected what the index lists, got no tensor {} ({})",
                       engine::shown_name(tensor), file.path());
    }
    require<IoError>(file.tensors().size() == tensors.size(),
                     "[gpt2] expected {} tensors as the index lists, got {} ({})", tensors.size(),
                     file.tensors().size(), file.path());
  }
}

void Gpt2Weights::add_file(std::string path) {
  files_.emplace_back(std::move(path));
  for (const engine::TensorInfo& info : files_.back().tensors()) {
    std::string_view name = info.name;
    if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
    const auto [place, is_new] = places_.emplace(name, Place{files_.size() - 1, &info});
    require<IoError>(is_new, "[gpt2] expected each tensor once, got {} again ({}, {})",
                     engine::shown_name(name), files_[place->second.file].path(),
                     files_.back().path());
  }
}

void Gpt2Weights::check_complete(std::span<const engine::TensorSpec> expected) const {
  constexpr std::size_t kMaxListed = 50, kMaxListedNbytes = 8192;
  std::vector<std::string> differences;
  std::set<std::string_view> names;
  for (const engine::TensorSpec& tensor : expected) {
    names.insert(tensor.name);
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) {
      differences.push_back(fmt::format("{} {} is missing", engine::shown_name(tensor.name),
                                        engine::to_string(tensor.shape)));
      continue;
    }
    const engine::TensorInfo& info = *found->second.info;
    if (info.shape != tensor.shape || !engine::SafetensorsFile::can_read(info)) {
      differences.push_back(
          fmt::format("{} is {} of {} and not {} of F32, BF16 or F16 in {}",
                      engine::shown_name(tensor.name), engine::to_string(info.shape), info.dtype,
                      engine::to_string(tensor.shape), files_[found->second.file].path()));
    }
  }
  for (const auto& [name, place] : places_) {
    if (names.contains(name) || is_mask_buffer(name) || name == "lm_head.weight") continue;
    differences.push_back(
        fmt::format("{} is unexpected in {}", engine::shown_name(name), files_[place.file].path()));
  }
  if (!differences.empty()) {
    const std::size_t max = std::min(kMaxListed, differences.size());
    std::size_t num_listed = 0;
    for (std::size_t nbytes = 0; num_listed < max && nbytes < kMaxListedNbytes; ++num_listed) {
      nbytes += differences[num_listed].size();
    }
    fail<IoError>("[gpt2] expected the {} tensors of the model, got {} differences ({}):\n  {}{}",
                  expected.size(), differences.size(), folder_,
                  engine::join(std::span(differences).first(num_listed), "\n  "),
                  num_listed < differences.size() ? "\n  ..." : "");
  }
  check_head();
}

void Gpt2Weights::check_head() const {
  const auto head = places_.find("lm_head.weight"), embedding = places_.find("wte.weight");
  if (head == places_.end() || embedding == places_.end()) return;
  const engine::TensorInfo& a = *head->second.info;
  const engine::TensorInfo& b = *embedding->second.info;
  const engine::SafetensorsFile& a_file = files_[head->second.file];
  const engine::SafetensorsFile& b_file = files_[embedding->second.file];
  bool equal = a.shape == b.shape && a.dtype == b.dtype;
  std::vector<float> left(1 << 16), right(left.size());
  for (std::int64_t at = 0; equal && at < engine::numel(b.shape); at += std::ssize(left)) {
    const auto n =
        static_cast<std::size_t>(std::min(std::ssize(left), engine::numel(b.shape) - at));
    a_file.read(a, at, std::span(left).first(n));
    b_file.read(b, at, std::span(right).first(n));
    equal = std::memcmp(left.data(), right.data(), n * sizeof(float)) == 0;
  }
  require<IoError>(equal,
                   "[gpt2] expected an output matrix that is the embedding wte.weight, got another "
                   "(tensor {}, {})",
                   engine::shown_name(a.name), a_file.path());
}

void Gpt2Weights::read(const engine::TensorSpec& tensor, std::int64_t first,
                       std::span<float> out) const {
  const auto found = places_.find(tensor.name);
  require<IoError>(found != places_.end(), "[gpt2] expected tensor {}, got none ({})",
                   engine::shown_name(tensor.name), folder_);
  const auto& [file, info] = found->second;
  require<IoError>(info->shape == tensor.shape, "[gpt2] expected {}, got {} (tensor {}, {})",
                   engine::to_string(tensor.shape), engine::to_string(info->shape),
                   engine::shown_name(tensor.name), files_[file].path());
  files_[file].read(*info, first, out);
}

std::span<const float> Gpt2Weights::lookup(const engine::TensorSpec& tensor) {
  buffer_.resize(static_cast<std::size_t>(engine::numel(tensor.shape)));
  read(tensor, 0, buffer_);
  return buffer_;
}

}  // namespace tessera::tools

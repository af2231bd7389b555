#include "tools/gpt2_files.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "engine/error.h"
#include "tools/file.h"
#include "tools/json.h"
#include "tools/text.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr std::string_view kPrefix = "transformer.";
constexpr std::int64_t kMaxConfigNbytes = 1 << 20;
constexpr std::int64_t kMaxIndexNbytes = 1 << 26;

/// config.json with typed access; errors name the file and the key.
class Config {
 public:
  explicit Config(std::string path)
      : path_(std::move(path)), json_(parse_json(read_text_file(path_, kMaxConfigNbytes), path_)) {
    require<IoError>(json_.is_object(), "[gpt2] expected an object, got otherwise ({})", path_);
  }

  bool has(const char* key) const { return json_.contains(key); }

  std::int64_t integer(const char* key) const {
    constexpr std::int64_t kMax = std::int64_t{1} << 24;
    require<IoError>(has(key), "[gpt2] expected key {}, got none ({})", key, path_);
    const json& value = json_.at(key);
    require<IoError>(value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                         value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMax),
                     "[gpt2] expected {} in [1, {}], got {} ({})", key, kMax, value.dump(), path_);
    return value.get<std::int64_t>();
  }

  /// In [min, 1): `unless_there` when the key is missing.
  double fraction(const char* key, double unless_there, double min) const {
    if (!has(key)) return unless_there;
    const json& value = json_.at(key);
    require<IoError>(value.is_number() && value.get<double>() >= min && value.get<double>() < 1,
                     "[gpt2] expected {} in [{}, 1), got {} ({})", key, min, value.dump(), path_);
    return value.get<double>();
  }

  /// The key may be missing; a value must be one of `supported`.
  void check(const char* key, std::initializer_list<json> supported) const {
    if (!has(key) || std::ranges::count(supported, json_.at(key)) > 0) return;
    std::string list;
    for (const json& value : supported) list += (list.empty() ? "" : " or ") + value.dump();
    fail<IoError>("[gpt2] expected {} to be {}, got {} ({})", key, list, json_.at(key).dump(),
                  path_);
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
  const json index = parse_json(read_text_file(path, kMaxIndexNbytes), path);
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
        shown_name(value.dump()), shown_name(tensor), path);
    files[file].insert(tensor);
  }
  return files;
}

std::vector<TensorSpec> with_prefix(std::span<const TensorSpec> tensors) {
  std::vector<TensorSpec> prefixed(tensors.begin(), tensors.end());
  for (TensorSpec& tensor : prefixed) tensor.name.insert(0, kPrefix);
  return prefixed;
}

const std::string& created(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<IoError>(!error, "[gpt2] expected to create a folder, got {} ({})", error.message(),
                   folder);
  return folder;
}

}  // namespace

Gpt2FileConfig read_gpt2_config(const std::string& folder) {
  const Config file(folder + "/config.json");
  Gpt2FileConfig config;
  file.check("model_type", {"gpt2"});
  config.n_layer = file.integer("n_layer");
  config.n_head = file.integer("n_head");
  config.n_embd = file.integer("n_embd");
  config.n_positions = file.integer(file.has("n_positions") ? "n_positions" : "n_ctx");
  config.vocab_size = file.integer("vocab_size");
  require<IoError>(config.n_embd % config.n_head == 0,
                   "[gpt2] expected n_embd to be a multiple of n_head, got {} and {} ({})",
                   config.n_embd, config.n_head, folder + "/config.json");
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

Gpt2Weights::Gpt2Weights(const std::string& folder) : folder_(folder) {
  const std::string whole = folder + "/model.safetensors", index = whole + ".index.json";
  std::error_code ignored;
  if (std::filesystem::exists(whole, ignored) || !std::filesystem::exists(index, ignored)) {
    add_file(whole);
    return;
  }
  for (const auto& [name, tensors] : read_index(index)) {
    add_file(fmt::format("{}/{}", folder, name));
    const SafetensorsFile& file = files_.back();
    for (const std::string& tensor : tensors) {
      require<IoError>(file.find(tensor) != nullptr,
                       "[gpt2] expected what the index lists, got no tensor {} ({})",
                       shown_name(tensor), file.path());
    }
    require<IoError>(file.tensors().size() == tensors.size(),
                     "[gpt2] expected {} tensors as the index lists, got {} ({})", tensors.size(),
                     file.tensors().size(), file.path());
  }
}

void Gpt2Weights::add_file(std::string path) {
  files_.emplace_back(std::move(path));
  for (const TensorInfo& info : files_.back().tensors()) {
    std::string_view name = info.name;
    if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
    const auto [place, is_new] = places_.emplace(name, Place{files_.size() - 1, &info});
    require<IoError>(is_new, "[gpt2] expected each tensor once, got {} again ({}, {})",
                     shown_name(name), files_[place->second.file].path(), files_.back().path());
  }
}

void Gpt2Weights::check_complete(std::span<const TensorSpec> expected) const {
  constexpr std::size_t kMaxListed = 50;
  std::vector<std::string> differences;
  std::set<std::string_view> names;
  for (const TensorSpec& tensor : expected) {
    names.insert(tensor.name);
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) {
      differences.push_back(
          fmt::format("{} {} is missing", shown_name(tensor.name), to_string(tensor.shape)));
      continue;
    }
    const TensorInfo& info = *found->second.info;
    if (info.shape != tensor.shape || !SafetensorsFile::can_read(info)) {
      differences.push_back(fmt::format("{} is {} of {} and not {} of F32, BF16 or F16 in {}",
                                        shown_name(tensor.name), to_string(info.shape), info.dtype,
                                        to_string(tensor.shape),
                                        files_[found->second.file].path()));
    }
  }
  for (const auto& [name, place] : places_) {
    if (names.contains(name) || is_mask_buffer(name) || name == "lm_head.weight") continue;
    differences.push_back(
        fmt::format("{} is unexpected in {}", shown_name(name), files_[place.file].path()));
  }
  if (!differences.empty()) {
    const std::size_t num_listed = std::min(kMaxListed, differences.size());
    fail<IoError>("[gpt2] expected the {} tensors of the model, got {} differences ({}):\n  {}{}",
                  expected.size(), differences.size(), folder_,
                  join(std::span(differences).first(num_listed), "\n  "),
                  num_listed < differences.size() ? "\n  ..." : "");
  }
  check_head();
}

void Gpt2Weights::check_head() const {
  const auto head = places_.find("lm_head.weight"), embedding = places_.find("wte.weight");
  if (head == places_.end() || embedding == places_.end()) return;
  const TensorInfo& a = *head->second.info;
  const TensorInfo& b = *embedding->second.info;
  const SafetensorsFile& a_file = files_[head->second.file];
  const SafetensorsFile& b_file = files_[embedding->second.file];
  bool equal = a.shape == b.shape && a.dtype == b.dtype;
  std::vector<float> left(1 << 16), right(left.size());
  for (std::int64_t at = 0; equal && at < numel(b.shape); at += std::ssize(left)) {
    const auto n = static_cast<std::size_t>(std::min(std::ssize(left), numel(b.shape) - at));
    a_file.read(a, at, std::span(left).first(n));
    b_file.read(b, at, std::span(right).first(n));
    equal = std::memcmp(left.data(), right.data(), n * sizeof(float)) == 0;
  }
  require<IoError>(equal,
                   "[gpt2] expected an output matrix that is the embedding wte.weight, got another "
                   "(tensor {}, {})",
                   shown_name(a.name), a_file.path());
}

void Gpt2Weights::read(const TensorSpec& tensor, std::int64_t first, std::span<float> out) const {
  const auto found = places_.find(tensor.name);
  require<IoError>(found != places_.end(), "[gpt2] expected tensor {}, got none ({})",
                   shown_name(tensor.name), folder_);
  const auto& [file, info] = found->second;
  require<IoError>(info->shape == tensor.shape, "[gpt2] expected {}, got {} (tensor {}, {})",
                   to_string(tensor.shape), to_string(info->shape), shown_name(tensor.name),
                   files_[file].path());
  files_[file].read(*info, first, out);
}

std::span<const float> Gpt2Weights::lookup(const TensorSpec& tensor) {
  buffer_.resize(static_cast<std::size_t>(numel(tensor.shape)));
  read(tensor, 0, buffer_);
  return buffer_;
}

Gpt2Writer::Gpt2Writer(std::string folder, const Gpt2FileConfig& config,
                       std::span<const TensorSpec> tensors)
    : folder_(std::move(folder)),
      config_(config),
      weights_(created(folder_) + "/model.safetensors", with_prefix(tensors)) {}

void Gpt2Writer::write(std::string_view name, std::span<const float> data) {
  weights_.write(std::string(kPrefix) + std::string(name), data);
}

void Gpt2Writer::finish() {
  weights_.finish();
  // GPT-2's own end of text, or the last token of a smaller vocabulary.
  const std::int64_t end_of_text = std::min<std::int64_t>(50256, config_.vocab_size - 1);
  const json config = {
      {"activation_function", "gelu_new"},
      {"architectures", {"GPT2LMHeadModel"}},
      {"attn_pdrop", config_.attn_pdrop},
      {"bos_token_id", end_of_text},
      {"embd_pdrop", config_.embd_pdrop},
      {"eos_token_id", end_of_text},
      {"layer_norm_epsilon", config_.layer_norm_epsilon},
      {"model_type", "gpt2"},
      {"n_embd", config_.n_embd},
      {"n_head", config_.n_head},
      {"n_inner", nullptr},
      {"n_layer", config_.n_layer},
      {"n_positions", config_.n_positions},
      {"resid_pdrop", config_.resid_pdrop},
      {"tie_word_embeddings", true},
      {"torch_dtype", "float32"},
      {"vocab_size", config_.vocab_size},
  };
  AtomicFile file(folder_ + "/config.json");
  const std::string text = config.dump(2) + "\n";
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace tessera::tools

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/io/gpt2_files.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

constexpr const char* kPrefix = "transformer.";

std::vector<engine::TensorSpec> with_prefix(std::span<const engine::TensorSpec> tensors) {
  std::vector<engine::TensorSpec> prefixed(tensors.begin(), tensors.end());
  for (engine::TensorSpec& tensor : prefixed) tensor.name.insert(0, kPrefix);
  return prefixed;
}

const std::string& created(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> made;
  for (std::filesystem::path path = folder; !path.empty() && !std::filesystem::exists(path, error);
       path = path.parent_path()) {
    made.push_back(path.string());
  }
  std::filesystem::create_directories(folder, error);
  require<IoError>(!error, "[gpt2] expected to create a folder, got {} ({})", error.message(),
                   folder);
  for (const std::string& path : made) engine::flush_folder_of(path);
  return folder;
}

// Put together by hand: the destructor of a JSON library's value allocates, and a save must not end
// the process when memory is short.
std::string config_text(const Gpt2FileConfig& config) {
  // GPT-2's own end of text, or the last token of a smaller vocabulary.
  const std::int64_t end_of_text = std::min<std::int64_t>(50256, config.vocab_size - 1);
  const std::pair<const char*, std::string> keys[] = {
      {"activation_function", engine::json_literal("gelu_new")},
      {"architectures", fmt::format("[{}]", engine::json_literal("GPT2LMHeadModel"))},
      {"attn_pdrop", engine::json_literal(config.attn_pdrop)},
      {"bos_token_id", engine::json_literal(end_of_text)},
      {"embd_pdrop", engine::json_literal(config.embd_pdrop)},
      {"eos_token_id", engine::json_literal(end_of_text)},
      {"layer_norm_epsilon", engine::json_literal(config.layer_norm_epsilon)},
      {"model_type", engine::json_literal("gpt2")},
      {"n_embd", engine::json_literal(config.n_embd)},
      {"n_head", engine::json_literal(config.n_head)},
      {"n_inner", "null"},
      {"n_layer", engine::json_literal(config.n_layer)},
      {"n_positions", engine::json_literal(config.n_positions)},
      {"resid_pdrop", engine::json_literal(config.resid_pdrop)},
      {"tie_word_embeddings", engine::json_literal(true)},
      {"torch_dtype", engine::json_literal("float32")},
      {"vocab_size", engine::json_literal(config.vocab_size)},
  };
  std::string text;
  for (const auto& [key, value] : keys) {
    text +=
        fmt::format("{}  {}: {}", text.empty() ? "{\n" : ",\n", engine::json_literal(key), value);
  }
  return text + "\n}\n";
}

/// Waits for other savers to be done, but at most a minute, since one that hangs would cost this
/// model. Without a turn the worst is a folder that is refused when it is loaded.
void take_turn(const engine::FileDescriptor& folder, const std::string& path) {
  constexpr int kPatience_s = 60;
  for (int i = 0; i < 100 * kPatience_s && engine::try_lock(folder) == engine::Lock::kHeldByAnother;
       ++i) {
    if (i == 100) {
      std::fprintf(stderr, "warning: [gpt2] another process holds the folder; waiting (%s)\n",
                   engine::escaped(path).c_str());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

/// False when there is no file `from`.
bool rename_if_there(const std::string& from, const std::string& to) {
  const int error = ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
  require<IoError>(error == 0 || error == ENOENT, "[gpt2] expected to rename {} to {}, got {}",
                   from, to, std::generic_category().message(error));
  return error == 0;
}

// The shards of the model that was in `folder`, and last their index: what is left of them by a
// process that dies here is found by it.
void remove_shards(const std::string& folder) {
  const std::string index = "model.safetensors.index.json";
  if (::access(fmt::format("{}/{}", folder, index).c_str(), F_OK) != 0) return;
  std::vector<std::string> names;
  try {
    names = gpt2_shards(folder);
  } catch (const IoError&) {  // no model's that could be loaded
  }
  std::erase(names, "model.safetensors");
  names.push_back(index);
  for (const std::string& name : names) {
    const std::string path = fmt::format("{}/{}", folder, name);
    if (::unlink(path.c_str()) == 0 || errno == ENOENT) continue;
    std::fprintf(stderr, "warning: [gpt2] could not remove %s, of the model that was there: %s\n",
                 engine::escaped(path).c_str(), std::generic_category().message(errno).c_str());
  }
}

}  // namespace

Gpt2Writer::Gpt2Writer(std::string folder, const Gpt2FileConfig& config,
                       std::span<const engine::TensorSpec> tensors)
    : folder_(std::move(folder)),
      config_text_(config_text(config)),
      weights_(created(folder_) + "/model.safetensors", with_prefix(tensors),
               {{"format", "pt"}, {kGpt2ConfigKey, config_text_}}),
      config_(folder_ + "/config.json") {}

void Gpt2Writer::write(std::string_view name, std::span<const float> data) {
  weights_.write(std::string(kPrefix) + std::string(name), data);
}

void Gpt2Writer::finish() {
  const std::string& path = config_.path();
  const std::string replaced = folder_ + "/" + kGpt2ReplacedConfig;
  weights_.flush();
  // Savers into one folder take turns, where it can be locked; the lock ends with the descriptor.
  const engine::FileDescriptor turn(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  take_turn(turn, folder_);
  if (engine::holds_text(path, config_text_)) {
    weights_.replace();
    ::unlink(replaced.c_str());  // of a save that was cut short
    engine::flush_folder_of(path);
    remove_shards(folder_);
    return;
  }
  config_.write(std::as_bytes(std::span(config_text_)));
  config_.flush();
  const bool moved = rename_if_there(path, replaced);
  try {
    engine::flush_folder_of(path);
    weights_.replace();
  } catch (...) {
    if (moved) rename_if_there(replaced, path);
    throw;
  }
  const auto place_config = [&] {
    config_.replace();
    ::unlink(replaced.c_str());
  };
  try {
    engine::flush_folder_of(path);
  } catch (...) {
    place_config();  // the new model is whole, if perhaps not after a power cut
    throw;
  }
  place_config();
  engine::flush_folder_of(path);
  remove_shards(folder_);
}

}  // namespace tessera::tools

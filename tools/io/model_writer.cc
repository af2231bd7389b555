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
#include "tools/io/config_file.h"
#include "tools/io/model_weights.h"

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

const std::string& created(const std::string& folder, const ModelLayout& layout) {
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
  check_replaceable(folder, layout);
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

// The shards of the model that was in `folder`, and last their index: what is left of them by a
// process that dies here is found by it.
void remove_shards(const std::string& folder, const ModelLayout& layout) {
  const std::string index = "model.safetensors.index.json";
  if (::access(fmt::format("{}/{}", folder, index).c_str(), F_OK) != 0) return;
  std::vector<std::string> names;
  try {
    names = model_shards(folder, layout.family);
  } catch (const IoError&) {  // no model's that could be loaded
  }
  std::erase(names, "model.safetensors");
  names.push_back(index);
  for (const std::string& name : names) {
    const std::string path = fmt::format("{}/{}", folder, name);
    if (::unlink(path.c_str()) == 0 || errno == ENOENT) continue;
    std::fprintf(stderr, "warning: [%s] could not remove %s, of the model that was there: %s\n",
                 layout.family.c_str(), engine::escaped(path).c_str(),
                 std::generic_category().message(errno).c_str());
  }
}

}  // namespace

ModelWriter::ModelWriter(std::string folder, ModelLayout layout, std::string config_text,
                         std::span<const engine::TensorSpec> tensors)
    : folder_(std::move(folder)),
      layout_(std::move(layout)),
      config_text_(std::move(config_text)),
      weights_(created(folder_, layout_) + "/model.safetensors", as_written(tensors, layout_),
               {{"format", "pt"}, {kConfigKey, config_text_}}),
      config_(folder_ + "/config.json") {}

void ModelWriter::write(std::string_view name, std::span<const float> data) {
  weights_.write(written_name(name, layout_), data);
}

void ModelWriter::finish() {
  const std::string& path = config_.path();
  const std::string replaced = folder_ + "/" + kReplacedConfig;
  weights_.flush();
  // Savers into one folder take turns, where it can be locked; the lock ends with the descriptor.
  const engine::FileDescriptor turn(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  take_turn(turn, folder_, layout_);
  if (engine::holds_text(path, config_text_)) {
    weights_.replace();
    ::unlink(replaced.c_str());  // of a save that was cut short
    engine::flush_folder_of(path);
    remove_shards(folder_, layout_);
    return;
  }
  config_.write(std::as_bytes(std::span(config_text_)));
  config_.flush();
  const bool moved = rename_if_there(path, replaced, layout_);
  try {
    engine::flush_folder_of(path);
    weights_.replace();
  } catch (...) {
    if (moved) rename_if_there(replaced, path, layout_);
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
  remove_shards(folder_, layout_);
}

}  // namespace tessera::tools

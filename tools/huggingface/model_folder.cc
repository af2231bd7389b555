#include "tools/huggingface/model_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tools/io/file_kind.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

using engine::fail;
using engine::IoError;
using engine::require;

bool is_checkpoint(const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [](const std::string& name) {
    return name == "manifest.json" || name.starts_with("step_");
  });
}

bool is_of_pytorch(std::string_view name) { return name.starts_with("pytorch_model"); }

/// Of `names` those that hold weights in formats that are not read, last the one that is converted
/// best.
std::vector<std::string> foreign_weights(std::vector<std::string> names) {
  constexpr std::string_view kEndings[] = {
      ".bin",     ".bin.index.json", ".pt",   ".pth", ".ckpt",       ".h5",
      ".msgpack", ".gguf",           ".onnx", ".npz", ".safetensors"};
  // What Trainer of transformers saves beside them.
  constexpr std::string_view kNoWeights[] = {"training_args.", "optimizer.", "scheduler.",
                                             "rng_state"};
  std::erase_if(names, [&](const std::string& name) {
    return std::ranges::none_of(kEndings, [&](std::string_view e) { return name.ends_with(e); }) ||
           std::ranges::any_of(kNoWeights, [&](std::string_view n) { return name.starts_with(n); });
  });
  std::ranges::sort(names, {},
                    [](const std::string& name) { return std::pair(is_of_pytorch(name), name); });
  return names;
}

// How a folder of safetensors is made of one whose weights are in the file `name`.
std::string conversion_of(const std::string& name) {
  const auto load = [](const std::string& more, const char* save = "save_pretrained(OTHER)") {
    return fmt::format(
        "convert it, in Python transformers.AutoModelForCausalLM.from_pretrained(FOLDER{}).{}",
        more, save);
  };
  if (name.starts_with("adapter_model.")) {
    return "it is an adapter: give the model that it is of, and the adapter with --lora.from "
           "(training) or --adapter (//tools:generate); or make one model of both by "
           "//tools:convert --merge";
  }
  if (name.starts_with("consolidated.")) {
    return "it has the names of the model's makers: give the folder of this model that is made for "
           "transformers, with config.json and model.safetensors";
  }
  if (name.ends_with(".safetensors")) {
    return "give it that name if it is the whole model; shards need model.safetensors.index.json";
  }
  if (name.ends_with(".gguf")) return load(fmt::format(", gguf_file=\"{}\"", name));
  if (name.ends_with(".h5")) return load(", from_tf=True") + ", with transformers 4";
  if (name.ends_with(".msgpack")) return load(", from_flax=True") + ", with transformers 4";
  if (is_of_pytorch(name)) {
    return load("", "save_pretrained(OTHER, safe_serialization=True)");
  }
  return "load it by the program that wrote it, and save it as a model of transformers, by "
         "save_pretrained(OTHER)";
}

}  // namespace

void check_model_folder(const std::string& folder) {
  std::error_code ignored;
  const fs::file_status status = fs::status(folder, ignored);
  require<IoError>(status.type() != fs::file_type::regular,
                   "[model] expected a folder, got a file: give the folder that config.json and "
                   "model.safetensors lie in ({})",
                   folder);
  require<IoError>(status.type() != fs::file_type::not_found,
                   "[model] expected {}/config.json, got {}; a model of Hugging Face is downloaded "
                   "by `hf download NAME --local-dir=FOLDER` ({})",
                   folder, std::generic_category().message(ENOENT), folder);
  const std::vector<std::string> names = engine::names_in_folder(folder);
  const auto has = [&](std::string_view name) { return std::ranges::count(names, name) > 0; };
  if (has("model.safetensors") || has("model.safetensors.index.json")) return;
  require<IoError>(has("config.json") || !is_checkpoint(names),
                   "[model] expected config.json and model.safetensors, got a checkpoint: go on "
                   "from it with --resume, or make a model of it with //tools:convert ({})",
                   folder);
  require<IoError>(has("config.json") || !has("checkpoints"),
                   "[model] expected config.json and model.safetensors, got the folder of a run: "
                   "make a model of it with //tools:convert, --from={}/checkpoints ({})",
                   folder, folder);
  const std::vector<std::string> foreign = foreign_weights(names);
  if (foreign.empty()) return;
  fail<IoError>("[model] expected model.safetensors, got {}{} alone: {} ({})", foreign.back(),
                foreign.size() > 1 ? fmt::format(" and {} more", foreign.size() - 1) : "",
                conversion_of(foreign.back()), folder);
}

bool is_missing(const std::string& path) {
  std::error_code ignored;
  return fs::status(path, ignored).type() == fs::file_type::not_found;
}

void check_is_json(std::string_view text, const std::string& path) {
  const FileKind* kind = file_kind(text.substr(0, kFileKindNbytes));
  if (kind == nullptr || kind->is_json) return;
  fail<IoError>("[model] expected JSON, got {}: {} ({})", kind->name, kind->as_weights, path);
}

engine::SafetensorsFile open_weights(std::string path) {
  const FileKind* kind = kind_of_file(path);
  require<IoError>(
      kind == nullptr || kind->is_safetensors, "[model] expected safetensors, got {}: {} ({})",
      kind == nullptr ? "" : kind->name, kind == nullptr ? "" : kind->as_weights, path);
  return engine::SafetensorsFile(std::move(path));
}

}  // namespace tessera::tools

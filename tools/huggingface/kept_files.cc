#include "tools/huggingface/kept_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_folder.h"

namespace tessera::tools {
namespace {

using nlohmann::json;

constexpr std::string_view kNames[] = {
    "added_tokens.json", "chat_template.jinja",     "chat_template.json", "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "spiece.model",       "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json",         "vocab.txt"};
constexpr std::int64_t kMaxFileNbytes = std::int64_t{256} << 20;

// Keys that say in other words what `own` says: how numbers are stored, and how heads turn.
constexpr std::string_view kSaidOtherwise[] = {"dtype", "rope_parameters"};

json object_of(const std::string& text) {
  json all = engine::parse_json(text, "config.json");
  engine::require<engine::IoError>(all.is_object(), "[model] expected an object in config.json");
  return all;
}

}  // namespace

KeptFiles read_kept_files(const std::string& folder) {
  KeptFiles kept;
  if (folder.empty()) return kept;
  check_save_ended(folder);
  const std::string config = folder + "/config.json";
  if (!is_missing(config)) kept.config_text = engine::read_text_file(config, kMaxConfigNbytes);
  for (const std::string_view name : kNames) {
    const std::string path = folder + "/" + std::string(name);
    if (is_missing(path)) continue;
    kept.files.push_back({std::string(name), engine::read_text_file(path, kMaxFileNbytes)});
  }
  return kept;
}

std::vector<std::string> other_kept_files(const std::string& folder, const KeptFiles& kept) {
  std::vector<std::string> names;
  for (const std::string_view name : kNames) {
    const bool is_kept = std::ranges::count(kept.files, name, &KeptFiles::File::name) > 0;
    if (!is_kept && !is_missing(folder + "/" + std::string(name))) names.emplace_back(name);
  }
  return names;
}

std::string with_kept_keys(const std::string& own, const std::string& kept) {
  if (kept.empty()) return own;
  json all = object_of(kept), ours = object_of(own);
  const engine::JsonEnd end_of_all(all), end_of_ours(ours);
  for (const std::string_view key : kSaidOtherwise) all.erase(std::string(key));
  for (const auto& [key, value] : ours.items()) {
    if (!key.ends_with("_token_id") || !all.contains(key)) all[key] = value;
  }
  return all == ours ? own : all.dump(2) + "\n";
}

}  // namespace tessera::tools

#include "tools/config/save_config.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/huggingface/adapter_files.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/kept_files.h"
#include "tools/huggingface/model_index.h"

namespace tessera::tools {

void SaveConfig::add_to(FlagSet& flags, std::string_view titles) {
  flags.add("save.final", &final,
            {.help = fmt::format(
                 "folder to save the trained model to, in the Hugging Face {} layout; with "
                 "init.from also the files of its tokenizer, and what its config.json says more. "
                 "Of adapters (lora.rank) they alone are saved, in PEFT's layout",
                 titles)});
  flags.add("save.shard_gib", &shard_gib,
            {.help = "GiB of weights in a file of save.final at most; a larger model is saved in "
                     "shards with an index; 0: one file of any size",
             .min = 0,
             .max = 1 << 20});
}

void SaveConfig::validate(const FlagSet& flags) const {
  engine::require(is_on() || !flags.is_given("save.shard_gib"),
                  "[config] expected save.final with save.shard_gib, got none: nothing is saved");
}

std::string SaveConfig::folder() const { return resolve_user_path(final); }

std::vector<RunFile> SaveConfig::files(bool of_adapters) const {
  if (!is_on()) return {};
  const std::string there = folder();
  if (of_adapters) {
    return {{"save.final", there + "/" + kAdapterConfig},
            {"save.final", there + "/" + kAdapterWeights}};
  }
  return {{"save.final", there + "/config.json"},
          {"save.final", there + "/" + kReplacedConfig},
          {"save.final", there + "/model.safetensors"},
          {"save.final", there + "/" + std::string(kModelIndex)}};
}

std::string SaveConfig::warning(bool of_adapters) const {
  for (const RunFile& file : files(of_adapters)) {
    std::error_code error;
    if (!std::filesystem::exists(file.path, error)) continue;
    return fmt::format("save.final: what {} has, {} among it, is replaced at the end",
                       engine::escaped(folder()),
                       engine::escaped(std::filesystem::path(file.path).filename().string()));
  }
  return "";
}

SaveOptions SaveConfig::options(const std::string& init_from) const {
  return {.shard_nbytes = shard_nbytes_of(shard_gib),
          .kept = read_kept_files(init_from.empty() ? "" : resolve_user_path(init_from))};
}

}  // namespace tessera::tools

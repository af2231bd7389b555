#include "tools/config/lora_config.h"

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/weights/adapter_files.h"

namespace tessera::tools {

using engine::require;

namespace {

// Whose errors name the option.
LoraOptions read_saved(const std::string& folder, const ModelConfig& base,
                       const std::string& from) {
  try {
    return read_lora(folder, base);
  } catch (const engine::IoError& e) {
    engine::fail<engine::IoError>("{} (lora.from={})", e.what(), from);
  }
}

}  // namespace

void LoraConfig::add_to(FlagSet& flags) {
  flags.add("lora.rank", &rank,
            {.help = "trains adapters of so many dimensions on the linear modules of layers, and "
                     "leaves the model itself as it is; 0: none, or as lora.from says",
             .min = 0,
             .max = 1 << 16});
  flags.add("lora.alpha", &alpha,
            {.help = "what adapters add is multiplied by lora.alpha / lora.rank; 0: 16, or as "
                     "lora.from says",
             .min = 0,
             .max = 1e9});
  flags.add(
      "lora.dropout", &dropout,
      {.help = "of what adapters take", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("lora.targets", &targets,
            {.help = "modules that get adapters, as files of the model call them, with commas "
                     "between (q_proj,v_proj), or all-linear; empty: those that PEFT takes by "
                     "itself, or as lora.from says"});
  flags.add("lora.from", &from,
            {.help = "folder of adapters to start from, in PEFT's layout (adapter_config.json, "
                     "adapter_model.safetensors)"});
}

LoraOptions LoraConfig::options(const ModelConfig& base) const {
  if (!is_on()) {
    const auto unused = [](bool is_given, const char* name) {
      require(!is_given, "[config] expected {} with lora.rank or lora.from, got neither", name);
    };
    unused(alpha != 0, "lora.alpha");
    unused(dropout != 0, "lora.dropout");
    unused(!targets.empty(), "lora.targets");
    return {};
  }
  LoraOptions options{.rank = rank, .alpha = alpha == 0 ? LoraOptions().alpha : alpha};
  const std::vector<std::string> asked = parse_lora_targets(targets);
  if (from.empty() || !asked.empty())
    options.targets = lora_targets(base.make()->linear_modules(), asked);
  if (!from.empty()) {
    const LoraOptions saved = read_saved(folder(), base, from);
    const auto same = [&](bool is_same, const char* name, const auto& in_file, const auto& got) {
      require(is_same, "[lora.from] expected {} of {} as in {}, got {}", name, in_file, from, got);
    };
    same(rank == 0 || rank == saved.rank, "lora.rank", saved.rank, rank);
    same(alpha == 0 || alpha == saved.alpha, "lora.alpha", saved.alpha, alpha);
    same(asked.empty() || options.targets == saved.targets, "lora.targets",
         engine::join(saved.targets, ","), targets);
    options = saved;
  }
  options.dropout = dropout;
  return options;
}

std::string LoraConfig::folder() const { return resolve_user_path(from); }

std::vector<RunFile> LoraConfig::files_read() const {
  if (from.empty()) return {};
  return {{"lora.from", folder() + "/" + kAdapterConfig},
          {"lora.from", folder() + "/" + kAdapterWeights}};
}

}  // namespace tessera::tools

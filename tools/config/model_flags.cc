#include "tools/config/model_flags.h"

#include <set>
#include <string_view>

#include "engine/error.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

namespace {

// Whose errors name the option.
ModelConfig config_to_start_from(const std::string& folder, const Families& families) {
  try {
    return read_model_config(resolve_user_path(folder), families);
  } catch (const IoError& e) {
    engine::fail<IoError>("{} (init.from={})", e.what(), folder);
  }
}

}  // namespace

void ModelFlags::add_to(FlagSet& flags, const Families& families) {
  flags.add("model.preset", &preset,
            {.help = "sizes of the model", .choices = preset_names(families)});
  const auto size = [&](const std::string& name, std::int64_t* field, const std::string& help) {
    flags.add(name, field,
              {.help = help + "; 0: as model.preset or init.from says", .min = 0, .max = 1 << 24});
  };
  size("model.layers", &layers, "transformer blocks");
  size("model.heads", &heads, "attention heads; most models divide model.dim by them");
  size("model.dim", &dim, "width");
  size("model.seq", &seq, "tokens of a sequence");
  size("model.vocab", &vocab, "tokens of the vocabulary");
  std::set<std::string> added;
  for (const ModelFamily* family : families) {
    for (const ModelFamily::Number& number : family->numbers()) {
      if (number.help.empty() || !added.insert(number.name).second) continue;
      size("model." + number.name, &numbers[number.name], number.help);
    }
  }
  flags.add("model.dropout", &dropout,
            {.help = "of embeddings and residual branches",
             .min = 0,
             .max = 1,
             .below_max = true,
             .is_f32 = true});
}

ModelConfig ModelFlags::config(const std::string& init_from, const Families& families) const {
  const bool from_file = !init_from.empty();
  require(!from_file || preset == ModelFlags().preset,
          "[init.from] expected sizes from {} alone, got model.preset={} as well", init_from,
          preset);
  ModelConfig config =
      from_file ? config_to_start_from(init_from, families) : preset_config(preset, families);
  const auto apply = [&](std::string_view name, std::int64_t flag, auto& field) {
    if (flag == 0) return;
    require(!from_file || flag == field, "[init.from] expected model.{} of {} as in {}, got {}",
            name, field, init_from, flag);
    field = flag;
  };
  apply("layers", layers, config.layers);
  apply("heads", heads, config.heads);
  apply("dim", dim, config.dim);
  apply("vocab", vocab, config.vocab);
  if (from_file) {
    require(seq <= config.seq, "[init.from] expected model.seq of at most {} as in {}, got {}",
            config.seq, init_from, seq);
  } else {
    apply("seq", seq, config.seq);
  }
  for (const auto& [name, flag] : numbers) {
    const auto number = config.numbers.find(name);
    require(flag == 0 || number != config.numbers.end(),
            "[config] expected model.{} of a model that has it, got it for one of {}", name,
            config.family->title());
    if (flag != 0) apply(name, flag, number->second);
  }
  config.dropout = dropout;
  return config;
}

}  // namespace tessera::tools

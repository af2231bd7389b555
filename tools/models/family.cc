#include "tools/models/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/config_file.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

namespace {

struct Size {
  const char* name;
  std::int64_t ModelConfig::*field;
};
constexpr const char *kLoraRank = "lora_rank", *kLoraAlpha = "lora_alpha",
                     *kLoraTargets = "lora_targets", *kLoraRs = "lora_rslora";
constexpr Size kSizes[] = {{"layers", &ModelConfig::layers},
                           {"heads", &ModelConfig::heads},
                           {"dim", &ModelConfig::dim},
                           {"seq", &ModelConfig::seq},
                           {"vocab", &ModelConfig::vocab}};

// Null: none of `families` is called so.
const ModelFamily* find_family(const std::string& name, const Families& families) {
  const auto found = std::ranges::find(families, name, &ModelFamily::name);
  return found == families.end() ? nullptr : *found;
}

}  // namespace

std::unique_ptr<LanguageModel> ModelConfig::make() const {
  require(family != nullptr, "[model] expected a family, got a model of none");
  std::unique_ptr<LanguageModel> model = family->make(*this);
  if (lora.is_on()) model->add_lora(lora);
  return model;
}

std::int64_t ModelConfig::num_parameters() const {
  std::int64_t numel = 0;
  const auto model = make();
  for (const engine::Parameter* p : parameters_of(*model)) numel += p->shape.numel();
  return numel;
}

std::int64_t ModelConfig::num_trained() const {
  std::int64_t numel = 0;
  const auto model = make();
  for (const engine::Parameter* p : parameters_of(*model))
    numel += p->trainable ? p->shape.numel() : 0;
  return numel;
}

std::int64_t ModelConfig::whole(const std::string& number) const {
  const double value = numbers.at(number);
  require(value >= 0 && value <= 1 << 24 && value == std::trunc(value),
          "[{}] expected a whole {} in [0, 2^24], got {}", family->name(), number, value);
  return static_cast<std::int64_t>(value);
}

double ModelConfig::train_flops(std::int64_t tokens) const { return make()->train_flops(tokens); }

ModelFamily::ModelFamily(std::string name, std::string title)
    : name_(std::move(name)), title_(std::move(title)) {}

std::string titles(const Families& of) {
  std::vector<std::string> titles;
  for (const ModelFamily* family : of) titles.push_back(family->title());
  return engine::join(titles, " or ");
}

std::vector<std::string> preset_names(const Families& of) {
  std::vector<std::string> names;
  for (const ModelFamily* family : of) {
    for (const ModelFamily::Preset& preset : family->presets()) names.push_back(preset.name);
  }
  return names;
}

ModelConfig preset_config(const std::string& name, const Families& of) {
  for (const ModelFamily* family : of) {
    for (ModelFamily::Preset& preset : family->presets()) {
      if (preset.name == name) return std::move(preset.config);
    }
  }
  engine::fail("[model] expected a preset of {}, got '{}'", fmt::join(preset_names(of), ", "),
               name);
}

ModelConfig read_model_config(const std::string& folder, const Families& of) {
  const FolderConfig config = read_folder_config(folder);
  const ConfigText& text = config.file ? *config.file : config.saved.value();
  const std::string kind = model_type(text);
  const ModelFamily* const family = kind.empty() ? of.front() : find_family(kind, of);
  std::vector<std::string> known;
  for (const ModelFamily* f : of) known.push_back(engine::json_literal(f->name()));
  require<IoError>(family != nullptr, "[model] expected model_type to be {}, got {} ({})",
                   engine::join(known, " or "), engine::json_literal(engine::excerpt(kind)),
                   text.path);
  return family->read_config(config);
}

std::string to_text(const ModelConfig& config) {
  JsonRecord record;
  record.add("model", config.family->name());
  for (const Size& size : kSizes) record.add(size.name, config.*size.field);
  for (const ModelFamily::Number& number : config.family->numbers()) {
    const double value = config.numbers.at(number.name);
    if (value == std::trunc(value)) {
      record.add(number.name, static_cast<std::int64_t>(value));
    } else {
      record.add(number.name, value);
    }
  }
  if (config.lora.is_on()) {
    record.add(kLoraRank, config.lora.rank);
    record.add(kLoraAlpha, config.lora.alpha);
    record.add(kLoraTargets, std::string_view(engine::join(config.lora.targets, ",")));
    if (config.lora.use_rslora) record.add(kLoraRs, std::int64_t{1});
  }
  return record.text();
}

ModelConfig parse_model_text(std::string_view text, std::string_view path, const Families& of) {
  const nlohmann::json all = engine::parse_json(text, path);
  const auto kind = all.is_object() ? all.find("model") : all.end();
  ModelConfig config;
  if (kind != all.end() && kind->is_string()) config.family = find_family(*kind, of);
  require<IoError>(config.family != nullptr,
                   "[model] expected a model of train_transformer, got {} ({})",
                   engine::excerpt(text), path);
  const auto number = [&](const std::string& key, bool is_whole) {
    const auto found = all.find(key);
    const bool is_good =
        found != all.end() && (is_whole ? found->is_number_integer() : found->is_number());
    require<IoError>(is_good, "[model] expected a number as {}, got {} ({})", key,
                     engine::excerpt(text), path);
    return *found;
  };
  for (const Size& size : kSizes) config.*size.field = number(size.name, true);
  for (const ModelFamily::Number& own : config.family->numbers()) {
    config.numbers[own.name] = number(own.name, !own.help.empty());
  }
  if (all.contains(kLoraRank)) {
    config.lora.rank = number(kLoraRank, true);
    config.lora.alpha = number(kLoraAlpha, false);
    config.lora.use_rslora = all.contains(kLoraRs);
    const auto targets = all.find(kLoraTargets);
    require<IoError>(targets != all.end() && targets->is_string(),
                     "[model] expected a text as {}, got {} ({})", kLoraTargets,
                     engine::excerpt(text), path);
    config.lora.targets = parse_lora_targets(targets->get<std::string>());
  }
  try {
    static_cast<void>(config.make());
  } catch (const engine::InvalidArgument& e) {
    engine::fail<IoError>("{} ({})", e.what(), path);
  }
  return config;
}

}  // namespace tessera::tools

// What a training reads: its samples, one by one, as text.
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/data/data_fit.h"
#include "tools/data/token_mix.h"
#include "tools/models/family.h"
#include "tools/programs/transformer_config.h"
#include "tools/samples/sample_view.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::require;

struct DataConfig : TransformerConfig {
  std::int64_t show = 0, count = 1;
  bool validation = false;
  std::string tokenizer;

  void add_to(FlagSet& flags) {
    flags.add("show", &show,
              {.help = "number of the first sample to show, from 0 on, as a training counts them",
               .min = 0,
               .max = std::int64_t{1} << 60});
    flags.add("count", &count,
              {.help = "how many samples to show, one after the other; 0: none, the data alone",
               .min = 0,
               .max = 1 << 20});
    flags.add("validation", &validation,
              {.help = "shows sequences that are kept for validation instead"});
    flags.add("tokenizer", &tokenizer,
              {.help = "folder of a model with tokenizer.json, or with GPT-2's vocab.json and "
                       "merges.txt, or a tokenizer.json, whose tokens the data are; empty: that of "
                       "init.from, if it has one; none: token ids are shown"});
    TransformerConfig::add_to(flags);
  }
};

// Of the model's own folder only where it is there.
std::optional<Tokenizer> tokenizer_of(const DataConfig& config, bool is_bytes) {
  require(!is_bytes || config.tokenizer.empty(),
          "[data] expected no tokenizer of data whose tokens are bytes, got {} (tokenizer)",
          config.tokenizer);
  if (is_bytes) return std::nullopt;
  if (!config.tokenizer.empty()) return Tokenizer::read(resolve_user_path(config.tokenizer));
  if (config.init_from.empty()) return std::nullopt;
  const std::string folder = resolve_user_path(config.init_from);
  for (const std::string_view name : {"/tokenizer.json", "/vocab.json"}) {
    std::error_code ignored;
    if (std::filesystem::exists(folder + std::string(name), ignored))
      return Tokenizer::read(folder);
  }
  return std::nullopt;
}

void show(const DataConfig& config, const TokenMix& data) {
  const std::optional<Tokenizer> tokenizer = tokenizer_of(config, data.is_bytes());
  std::optional<StreamDecoder> decoder;
  bool is_first_id = true;
  const TextOf text_of = [&](const std::int32_t* id) -> std::string {
    if (data.is_bytes()) return id == nullptr ? "" : std::string(1, static_cast<char>(*id));
    if (!tokenizer) {
      const bool is_first = std::exchange(is_first_id, id == nullptr);
      return id == nullptr ? "" : fmt::format("{}{}", is_first ? "" : " ", *id);
    }
    if (id == nullptr) {
      const std::string rest = decoder ? decoder->finish() : "";
      decoder.reset();
      return rest;
    }
    require(*id < tokenizer->vocab_size(),
            "[data] expected tokens of the tokenizer, which has {}, got {}: of which are the data? "
            "(tokenizer)",
            tokenizer->vocab_size(), *id);
    if (!decoder) decoder.emplace(*tokenizer, /*skip_special=*/false);
    return decoder->next(*id);
  };
  for (std::int64_t n = config.show; n < config.show + config.count; ++n) {
    const SampleView view = view_of(data, n, config.validation);
    const std::vector<std::string> lines = lines_of(view, text_of);
    fmt::print("{} {}, {}\n", config.validation ? "validation sequence" : "sample", n, lines[0]);
    for (std::size_t i = 1; i < lines.size(); ++i) fmt::print("{}\n", lines[i]);
  }
}

void run(int argc, char** argv) {
  DataConfig config;
  FlagSet flags("data",
                "Shows the samples of a training, as the model gets them: which tokens are read "
                "and which are learned, where documents begin, and padding. Takes the command "
                "line of train_transformer as it is; of it data.*, model.* and init.from say what "
                "the samples are, with train.seed, and nothing else changes them.");
  config.add_to(flags);
  if (!flags.parse(argc, argv, std::cout)) return;
  const ModelConfig sizes = config.model_config();
  const TokenMix data = config.dataset(sizes);
  fmt::print("data: {}\n", mix_text(data));
  if (data.num_val_sequences() > 0) {
    fmt::print("validation: {} sequences of {}\n", engine::with_commas(data.num_val_sequences()),
               data.seq());
  }
  config.settle_loss_mean(data.keeps_documents());
  for (const std::string& line : config.warnings(data, sizes)) fmt::print("warning: {}\n", line);
  require(!config.validation || config.show + config.count <= data.num_val_sequences(),
          "[data] expected sequences below the {} that are kept for validation, got {} from {} on "
          "(show)",
          data.num_val_sequences(), config.count, config.show);
  show(config, data);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}

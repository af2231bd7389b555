// What a training reads: its samples, one by one, as text.
#include <fmt/format.h>

#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/config/data/token_text.h"
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
    TransformerConfig::add_to(flags);
  }
};

void show(const DataConfig& config, const TokenMix& data,
          const std::optional<Tokenizer>& tokenizer) {
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
  std::optional<Tokenizer> tokenizer = config.read_tokenizer();
  const TokenMix data = config.dataset(sizes, tokenizer);
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
  if (!data.is_bytes()) tokenizer = tokenizer_of(config.data, config.init_from, data);
  show(config, data, tokenizer);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}

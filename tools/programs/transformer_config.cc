#include "tools/programs/transformer_config.h"

#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tools/cli/run_files.h"
#include "tools/report/run_log.h"

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

// Of the model in `folder`; none without one.
std::vector<RunFile> model_files(const std::string& folder) {
  constexpr std::string_view kEndings[] = {"/config.json", ".safetensors",
                                           ".safetensors.index.json"};
  if (folder.empty()) return {};
  return files_of("init.from", resolve_user_path(folder), kEndings);
}

}  // namespace

TransformerConfig::TransformerConfig(const Families& families) : families_(&families) {
  train.steps = 700;
  train.batch = 6;
  train.lr = 4e-3;
  train.warmup = 50;
  log.every = 50;
  log.val_every = 200;
  out = "runs/train_transformer";
}

void TransformerConfig::add_to(FlagSet& flags) {
  flags.add("model.preset", &model.preset,
            {.help = "sizes of the model", .choices = preset_names(*families_)});
  const auto size = [&](const std::string& name, std::int64_t* field, const std::string& help) {
    flags.add(name, field,
              {.help = help + "; 0: as model.preset or init.from says", .min = 0, .max = 1 << 24});
  };
  size("model.layers", &model.layers, "transformer blocks");
  size("model.heads", &model.heads, "attention heads; most models divide model.dim by them");
  size("model.dim", &model.dim, "width");
  size("model.seq", &model.seq, "tokens of a sequence");
  size("model.vocab", &model.vocab, "tokens of the vocabulary");
  std::set<std::string> added;
  for (const ModelFamily* family : *families_) {
    for (const ModelFamily::Number& number : family->numbers()) {
      if (number.help.empty() || !added.insert(number.name).second) continue;
      size("model." + number.name, &model.numbers[number.name], number.help);
    }
  }
  flags.add("model.dropout", &model.dropout,
            {.help = "of embeddings and residual branches",
             .min = 0,
             .max = 1,
             .below_max = true,
             .is_f32 = true});
  flags.add("init.from", &init_from,
            {.help = "folder of a Hugging Face " + titles(*families_) +
                     " model to start from: sizes and weights (safetensors of F32, F16 or BF16)"});
  save.add_to(flags, titles(*families_));
  data.add_to(flags);
  flags.add(
      "train.loss_mean", &loss_mean,
      EnumOption<LossMean>{
          "what loss and gradient of a step are; tokens: the mean over all tokens that are learned "
          "in it, on all ranks; batches: the mean of the means of its micro-batches; auto: tokens "
          "where data keep documents apart, batches elsewhere",
          {{"auto", LossMean::kAuto},
           {"batches", LossMean::kBatches},
           {"tokens", LossMean::kTokens}}});
  flags.add("sample.tokens", &sample_tokens,
            {.help = "tokens to generate at the end; 0: none", .min = 0, .max = 1 << 20});
  TrainConfig::add_to(flags);
  flags.add("cuda.attention", &cuda_attention,
            EnumOption<ops::CudaAttention>{
                "on GPUs: what computes attention in bf16; wgmma: what compute capability 9.x "
                "alone has, where heads are of 33 to 64 or 97 to 128, and mma elsewhere; auto: "
                "wgmma where the GPU has it",
                {{"auto", ops::CudaAttention::kAuto},
                 {"mma", ops::CudaAttention::kMma},
                 {"wgmma", ops::CudaAttention::kWgmma}}});
}

ModelConfig TransformerConfig::model_config() const {
  const bool from_file = !init_from.empty();
  require(!from_file || model.preset == ModelFlags().preset,
          "[init.from] expected sizes from {} alone, got model.preset={} as well", init_from,
          model.preset);
  ModelConfig config = from_file ? config_to_start_from(init_from, *families_)
                                 : preset_config(model.preset, *families_);
  const auto apply = [&](std::string_view name, std::int64_t flag, auto& field) {
    if (flag == 0) return;
    require(!from_file || flag == field, "[init.from] expected model.{} of {} as in {}, got {}",
            name, field, init_from, flag);
    field = flag;
  };
  apply("layers", model.layers, config.layers);
  apply("heads", model.heads, config.heads);
  apply("dim", model.dim, config.dim);
  apply("vocab", model.vocab, config.vocab);
  if (from_file) {
    require(model.seq <= config.seq,
            "[init.from] expected model.seq of at most {} as in {}, got {}", config.seq, init_from,
            model.seq);
  } else {
    apply("seq", model.seq, config.seq);
  }
  for (const auto& [name, flag] : model.numbers) {
    const auto number = config.numbers.find(name);
    require(flag == 0 || number != config.numbers.end(),
            "[config] expected model.{} of a model that has it, got it for one of {}", name,
            config.family->title());
    if (flag != 0) apply(name, flag, number->second);
  }
  config.dropout = model.dropout;
  config.cuda_attention = cuda_attention;
  static_cast<void>(config.make());  // or throws
  return config;
}

TokenMix TransformerConfig::dataset(const ModelConfig& sizes) const {
  return data.dataset(data_fit(sizes), model.seq == 0 ? sizes.seq : model.seq, train.seed);
}

std::vector<std::string> TransformerConfig::warnings(const TokenMix& tokens,
                                                     const ModelConfig& sizes) const {
  return mix_warnings(tokens, data_fit(sizes), !train.sums_losses());
}

void TransformerConfig::settle_loss_mean(bool keeps_documents) {
  const LossMean by_data = keeps_documents ? LossMean::kTokens : LossMean::kBatches;
  train.loss_mean = loss_mean == LossMean::kAuto ? by_data : loss_mean;
  // Smaller micro-batches have other means.
  require(!keeps_documents || train.sums_losses() || memory_budget.empty(),
          "[memory_budget] expected train.loss_mean=tokens with documents, as a budget may divide "
          "micro-batches, got batches (train.loss_mean)");
}

std::vector<std::string> TransformerConfig::check_data_head(const ModelConfig& sizes) const {
  return data.check_heads(data_fit(sizes));
}

std::vector<RunFile> TransformerConfig::files_read(const FlagSet& flags,
                                                   const std::vector<RunFile>& data) const {
  std::vector<RunFile> files = model_files(init_from);
  files.insert(files.end(), data.begin(), data.end());
  if (!flags.config_path().empty()) files.push_back({"config", flags.config_path()});
  return files;
}

void TransformerConfig::check_files(const FlagSet& flags, const std::vector<RunFile>& data) const {
  RunLog::check_outputs(*this, flags, data);
  RunLog::check_outputs(*this, flags, model_files(init_from));
  save.validate(flags);
  const std::vector<RunFile> saved = save.files();
  if (saved.empty()) return;
  check_files_differ(saved, data);
  check_files_differ(saved, RunLog::outputs(*this));
  checkpoint.check_apart(out, saved);
  const RunFile given{"config", flags.config_path()};
  if (!given.path.empty()) check_files_differ(saved, std::span(&given, 1));
}

}  // namespace tessera::tools

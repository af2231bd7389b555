#include "tools/programs/transformer_config.h"

#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tools/cli/run_files.h"
#include "tools/planning/require_memory.h"
#include "tools/report/run_log.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

namespace {

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
  model.add_to(flags, *families_);
  flags.add("init.from", &init_from,
            {.help = "folder of a Hugging Face " + titles(*families_) +
                     " model to start from: sizes and weights (safetensors of F32, F16 or BF16)"});
  lora.add_to(flags);
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
            {.help = "tokens to generate at the end, and after each of log.val_prompts; 0: none",
             .min = 0,
             .max = 1 << 20});
  flags.add("log.val_prompts", &val_prompts,
            {.help = "file of prompts, one in each line, or a .jsonl like data.path; after each "
                     "validation the model goes on with each by sample.tokens of its likeliest "
                     "tokens, as the terminal and the log say; empty: none"});
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
  ModelConfig config = model.config(init_from, *families_);
  config.cuda_attention = cuda_attention;
  config.lora = lora.options(config);
  static_cast<void>(config.make());  // or throws
  return config;
}

std::optional<Tokenizer> TransformerConfig::read_tokenizer() const {
  return data.tokenizes(init_from) ? data.read_tokenizer(init_from) : std::nullopt;
}

TokenMix TransformerConfig::dataset(const ModelConfig& sizes,
                                    const std::optional<Tokenizer>& tokenizer) const {
  require_memory(data.tokens_nbytes(init_from), "the tokens of texts",
                 "write them to a file by //tools:tokenize where there is more");
  const std::int64_t seq = model.seq == 0 ? sizes.seq : model.seq;
  return data.dataset(data_fit(sizes), seq, train.seed, tokenizer);
}

std::vector<std::string> TransformerConfig::warnings(const TokenMix& tokens,
                                                     const ModelConfig& sizes) const {
  std::vector<std::string> lines = mix_warnings(tokens, data_fit(sizes), !train.sums_losses());
  if (std::string line = save.warning(/*of_adapters=*/lora.is_on()); !line.empty()) {
    lines.push_back(std::move(line));
  }
  return lines;
}

void TransformerConfig::settle_loss_mean(bool keeps_documents) {
  const LossMean by_data = keeps_documents ? LossMean::kTokens : LossMean::kBatches;
  train.loss_mean = loss_mean == LossMean::kAuto ? by_data : loss_mean;
  // Smaller micro-batches have other means.
  require(!keeps_documents || train.sums_losses() || memory_budget.empty(),
          "[memory_budget] expected train.loss_mean=tokens with documents, as a budget may divide "
          "micro-batches, got batches (train.loss_mean)");
}

void TransformerConfig::check_attention(bool on_gpus) const {
  require(
      on_gpus || cuda_attention != ops::CudaAttention::kWgmma,
      "[config] expected cuda.attention=wgmma on GPUs only, got it where the device is the CPU");
}

std::vector<std::string> TransformerConfig::check_data_head(const ModelConfig& sizes) const {
  return data.check_heads(data_fit(sizes));
}

std::vector<RunFile> TransformerConfig::files_read() const {
  std::vector<RunFile> files = model_files(init_from);
  for (RunFile& file : lora.files_read()) files.push_back(std::move(file));
  if (!val_prompts.empty()) files.push_back({"log.val_prompts", resolve_user_path(val_prompts)});
  return files;
}

std::vector<RunFile> TransformerConfig::files_read(const FlagSet& flags,
                                                   const std::vector<RunFile>& data) const {
  std::vector<RunFile> files = files_read();
  files.insert(files.end(), data.begin(), data.end());
  if (!flags.config_path().empty()) files.push_back({"config", flags.config_path()});
  return files;
}

void TransformerConfig::check_files(const FlagSet& flags, const std::vector<RunFile>& data) const {
  RunLog::check_outputs(*this, flags, data);
  RunLog::check_outputs(*this, flags, model_files(init_from));
  RunLog::check_outputs(*this, flags, lora.files_read());
  save.validate(flags);
  require(!save.is_on() || !lora.is_on() || !init_from.empty(),
          "[config] expected save.final with init.from, as adapters are of a model that others "
          "have, got it without");
  require(!lora.is_on() || !flags.is_given("save.shard_gib"),
          "[config] expected no save.shard_gib with lora.rank or lora.from, as adapters are in one "
          "file, got it");
  const std::vector<RunFile> saved = save.files(/*of_adapters=*/lora.is_on());
  if (saved.empty()) return;
  check_files_differ(saved, data);
  check_files_differ(saved, RunLog::outputs(*this));
  checkpoint.check_apart(out, saved);
  const RunFile given{"config", flags.config_path()};
  if (!given.path.empty()) check_files_differ(saved, std::span(&given, 1));
}

}  // namespace tessera::tools

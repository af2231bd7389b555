// The configuration of train_transformer: what every trainer has, and model, text and sample.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "tools/cli/run_files.h"
#include "tools/config/data/token_data_config.h"
#include "tools/config/lora_config.h"
#include "tools/config/model_flags.h"
#include "tools/config/save_config.h"
#include "tools/config/train_config.h"
#include "tools/data/data_fit.h"
#include "tools/models/family.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

struct TransformerConfig : TrainConfig {
  ModelFlags model;
  std::string init_from;
  LoraConfig lora;
  SaveConfig save;
  TokenDataConfig data;
  LossMean loss_mean = LossMean::kAuto;
  std::int64_t sample_tokens = 300;
  std::string val_prompts;  ///< file; empty: none
  ops::CudaAttention cuda_attention = ops::CudaAttention::kAuto;

  TransformerConfig() : TransformerConfig(families()) {}
  /// `families`: whose models can be trained; they outlive this.
  explicit TransformerConfig(const Families& families);
  void add_to(FlagSet& flags);
  /// ModelFlags::config() with LoraConfig::options(): throws what they do.
  ModelConfig model_config() const;
  /// TokenDataConfig::read_tokenizer() where the data are to be tokenized, otherwise none.
  std::optional<Tokenizer> read_tokenizer() const;
  /// What a model of `sizes` is trained on, texts with `tokenizer`. Throws as
  /// TokenDataConfig::dataset(), and DeviceError for texts that memory does not hold.
  TokenMix dataset(const ModelConfig& sizes, const std::optional<Tokenizer>& tokenizer = {}) const;
  /// mix_warnings() of what dataset() has returned.
  std::vector<std::string> warnings(const TokenMix& tokens, const ModelConfig& sizes) const;
  /// Checks the first bytes of files that are given and there: for a program that plans a training
  /// of another place. Throws and returns warnings as TokenDataConfig::check_heads().
  std::vector<std::string> check_data_head(const ModelConfig& sizes) const;
  /// Throws InvalidArgument for kernels of attention that the device never has. What a GPU has is
  /// known on it alone: see ops::require_attention_kernels().
  void check_attention(bool on_gpus) const;
  /// Sets train.loss_mean, for such data. Throws InvalidArgument for a memory_budget that would
  /// change what the loss is the mean of.
  void settle_loss_mean(bool keeps_documents);
  /// The files of init.from, lora.from and log.val_prompts.
  std::vector<RunFile> files_read() const;
  /// What a training reads: `data`, these files, and that of --config.
  std::vector<RunFile> files_read(const FlagSet& flags, const std::vector<RunFile>& data) const;
  /// Throws InvalidArgument when an output is an input (`data`: the files in use). But a model may
  /// be saved to the folder it came from, and adapters to theirs: by then they were read, and their
  /// files are replaced.
  void check_files(const FlagSet& flags, const std::vector<RunFile>& data) const;

 private:
  DataFit data_fit(const ModelConfig& sizes) const { return data.fit(sizes.vocab, init_from); }

  const Families* families_;
};

}  // namespace tessera::tools

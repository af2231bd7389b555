// train_transformer's model and data, as run_task() takes them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tools/config/data/token_text.h"
#include "tools/data/token_mix.h"
#include "tools/huggingface/model_writer.h"
#include "tools/models/family.h"
#include "tools/programs/transformer_config.h"
#include "tools/train/task.h"
#include "tools/train/text/training_text.h"

namespace tessera::tools {

class TransformerTask : public Task {
 public:
  explicit TransformerTask(const Families& families = tools::families()) : config_(families) {}

  void add_to(FlagSet& flags) override { config_.add_to(flags); }
  const TrainConfig& config() const override { return config_; }
  TrainConfig& config() override { return config_; }
  void prepare(const FlagSet& flags, bool on_gpus) override;
  Items items() const override;
  std::int64_t num_samples() const override;
  std::string summary() const override;
  std::vector<std::string> warnings() const override;
  std::string model_text() const override;
  std::string data_text() const override;
  std::string data_digest() const override;
  std::vector<RunFile> files_read() const override { return config_.files_read(); }
  bool samples() const override { return config_.sample_tokens > 0; }
  std::unique_ptr<TaskRank> rank() const override;
  std::string closing_line(std::optional<std::int64_t> checkpoint) const override;

 private:
  TransformerConfig config_;
  ModelConfig model_;
  SaveOptions save_;
  std::optional<TokenMix> data_;
  TokenText text_;
  ValidationPrompts prompts_;
};

}  // namespace tessera::tools

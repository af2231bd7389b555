#include "tools/programs/transformer_task.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "ops/attention.h"
#include "tools/cli/stop.h"
#include "tools/config/data/token_text.h"
#include "tools/config/replicas.h"
#include "tools/data/data_digest.h"
#include "tools/models/family.h"
#include "tools/programs/transformer_plan.h"
#include "tools/train/text/training_text.h"
#include "tools/weights/adapter_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

class TransformerRank : public TaskRank {
 public:
  TransformerRank(const TransformerConfig& config, const ModelConfig& model, const TokenMix& data,
                  const TokenText& text, const ValidationPrompts& prompts, const SaveOptions& save)
      : config_(config),
        data_(data),
        text_(text),
        prompts_(prompts),
        save_(save),
        sizes_(model),
        model_(model.make()) {}

  Model& model() override { return *model_; }

  void load(Trainer& trainer, RunLog* log) override {
    shard::Fsdp& fsdp = trainer.fsdp();
    ops::require_attention_kernels(trainer.tape().stream(), config_.cuda_attention);
    if (!config_.init_from.empty()) {
      load_model(fsdp, *model_, resolve_user_path(config_.init_from));
    }
    if (!config_.lora.from.empty()) load_adapters(fsdp, *model_, config_.lora.folder());
    // Now, so that the first step is as others.
    if (!config_.init_from.empty() || !config_.lora.from.empty()) fsdp.parameters_changed();
    if (log == nullptr) return;
    const int num_ranks = trainer.world().size();
    const std::string replicas = replicas_text(config_, num_ranks);
    const double bucket_mb = config_.parallel.bucket_mb;
    log->say(fmt::format("plan {:016x}: {} units, {} on {} rank{}{}{}", fsdp.plan_hash(),
                         fsdp.units().size(), config_.parallel.strategy, num_ranks,
                         num_ranks == 1 ? "" : "s", replicas.empty() ? "" : ", " + replicas,
                         bucket_mb > 0 ? fmt::format(", buckets of {} MiB", bucket_mb) : ""));
  }

  Trainer::Data data() override {
    const std::int64_t batch = config_.train.batch;
    return {.tensors = tensors(batch),
            .fill = [batch, &data = data_](std::int64_t first,
                                           const Batch& host) { data.batch(first, batch, host); },
            .num_targets = [batch, &data = data_](
                               std::int64_t first) { return data.num_targets(first, batch); }};
  }

  // The mean over all tokens, of sequences in batches of one size.
  Trainer::Validate validation(Trainer& trainer) override {
    const std::int64_t num_val = data_.num_val_sequences();
    if (num_val == 0) return nullptr;
    return [this, &trainer, num_val, batch = largest_divisor(num_val, config_.train.batch)] {
      const auto loss_of = [&](std::int64_t b) {
        const Batch sequences =
            load_batch(trainer.tape().memory(), tensors(batch),
                       [&](const Batch& host) { data_.val_batch(b * batch, batch, host); });
        return model_->loss(trainer.tape(), sequences,
                            {.training = false, .is_sum = data_.keeps_documents()});
      };
      std::optional<std::int64_t> num_targets;  // unless all batches have as many
      if (data_.keeps_documents()) num_targets = data_.num_val_targets(0, num_val);
      const double loss = trainer.mean_loss(num_val / batch, loss_of, num_targets);
      Trainer::Validation validation{
          loss, validation_remark(loss, num_targets.value_or(num_val * data_.seq()))};
      if (!prompts_.prompts.empty() && std::isfinite(loss))
        add_continuations(trainer, *model_, prompts_, validation);
      return validation;
    };
  }

  std::vector<UnrecordedPass> unrecorded_passes() override {
    std::vector<UnrecordedPass> passes;
    if (const std::int64_t num_val = data_.num_val_sequences(); num_val > 0) {
      passes.push_back(
          validation_pass(*model_, tensors(largest_divisor(num_val, config_.train.batch))));
      if (!prompts_.prompts.empty()) passes.push_back(continuations_pass(*model_, prompts_));
    }
    if (auto sample = sample_pass(config_, *model_)) passes.push_back(*std::move(sample));
    return passes;
  }

  std::string finish(Trainer& trainer, RunLog* log) override {
    if (config_.save.is_on() && sizes_.lora.is_on()) {
      save_adapters(trainer.fsdp(), *model_, sizes_.lora, config_.save.folder(),
                    resolve_user_path(config_.init_from), trainer.world());
    } else if (config_.save.is_on()) {
      save_model(trainer.fsdp(), *model_, config_.save.folder(), trainer.world(), save_);
    }
    if (config_.sample_tokens == 0 || trainer.stopped_by() != 0) return "";
    std::string sample =
        sample_text(trainer, *model_, data_, said_tokens(data_, text_.tokenizer, sizes_.vocab),
                    config_.sample_tokens, std::uint64_t(config_.train.seed));
    if (trainer.stopped_by() != 0 && log != nullptr) {
      log->say(fmt::format("stopped by {} while sampling", signal_name(trainer.stopped_by())));
    }
    return sample;
  }

 private:
  std::string validation_remark(double loss, std::int64_t num_targets) const {
    if (data_.is_bytes()) return fmt::format(" ({:.3f} bits per byte)", loss / std::log(2.0));
    std::string remark = fmt::format(" (perplexity {:.2f} a token", std::exp(loss));
    if (text_.num_val_nbytes > 0) {
      const double per_byte = double(num_targets) / double(text_.num_val_nbytes);
      remark += fmt::format(", {:.3f} a byte", std::exp(loss * per_byte));
    }
    return remark + ")";
  }
  std::vector<BatchTensor> tensors(std::int64_t batch) const {
    return token_tensors(batch, data_.seq(), data_.packs());
  }

  const TransformerConfig& config_;
  const TokenMix& data_;
  const TokenText& text_;
  const ValidationPrompts& prompts_;
  const SaveOptions& save_;
  const ModelConfig& sizes_;
  std::unique_ptr<LanguageModel> model_;
};

}  // namespace

void TransformerTask::prepare(const FlagSet& flags, bool on_gpus) {
  engine::require(config_.data.val_fraction > 0 || config_.log.val_every == 0 ||
                      !flags.is_given("log.val_every"),
                  "[config] expected log.val_every with something to validate on, got {} with "
                  "data.val_fraction=0",
                  config_.log.val_every);
  config_.check_attention(on_gpus);
  model_ = config_.model_config();
  config_.check_blocks(model_.layers);
  std::optional<Tokenizer> tokenizer = config_.read_tokenizer();
  data_.emplace(config_.dataset(model_, tokenizer));
  text_ = token_text(config_.data, config_.init_from, *data_, std::move(tokenizer));
  config_.settle_loss_mean(data_->keeps_documents());
  std::vector<RunFile> files = config_.data.run_files(config_.data.sources());
  if (!config_.val_prompts.empty() && !config_.plan) {
    files.push_back({"log.val_prompts", resolve_user_path(config_.val_prompts)});
    prompts_ = read_validation_prompts(files.back().path, config_.data, *data_,
                                       said_tokens(*data_, text_.tokenizer, model_.vocab), model_,
                                       config_.sample_tokens);
    prompts_.keeps = config_.memory_budget.empty();
  }
  config_.check_files(flags, files);
  if (config_.save.is_on() && !config_.plan && model_.lora.is_on()) {
    check_can_save_adapters(model_, config_.save.folder(), resolve_user_path(config_.init_from));
  } else if (config_.save.is_on() && !config_.plan) {
    save_ = config_.save.options(config_.init_from);
    check_can_save_model(*model_.make(), config_.save.folder(), save_);
  }
}

TransformerTask::Items TransformerTask::items() const {
  const std::int64_t length = data_->mean_length();
  return {"tokens", data_->seq(), model_.train_flops(length) / static_cast<double>(length)};
}

std::string TransformerTask::summary() const {
  return fmt::format("model: {} layers x {}, {} heads, {:.2f}M parameters{}; data: {}",
                     model_.layers, model_.dim, model_.heads,
                     double(model_.num_parameters()) * 1e-6,
                     model_.lora.is_on() ? fmt::format(", of which {} in adapters are trained",
                                                       engine::with_commas(model_.num_trained()))
                                         : "",
                     mix_text(*data_));
}

std::vector<std::string> TransformerTask::warnings() const {
  return config_.warnings(*data_, model_);
}

// Sources of a mix have epochs of their own.
std::int64_t TransformerTask::num_samples() const {
  return data_->sources().size() == 1 ? data_->num_sequences() : 0;
}

std::string TransformerTask::model_text() const { return to_text(model_); }

std::string TransformerTask::data_text() const {
  return fmt::format("{} sequences of {} tokens from {}", data_->num_sequences(), data_->seq(),
                     data_->text());
}

std::string TransformerTask::data_digest() const {
  std::vector<std::string> digests;
  for (const TokenDataset& source : data_->sources()) digests.push_back(digest_of(source.file()));
  return digest_of_mix(digests, data_->quotas());
}

std::unique_ptr<TaskRank> TransformerTask::rank() const {
  return std::make_unique<TransformerRank>(config_, model_, *data_, text_, prompts_, save_);
}

std::string TransformerTask::closing_line(std::optional<std::int64_t> checkpoint) const {
  if (config_.save.is_on()) {
    return fmt::format("{} in {}", model_.lora.is_on() ? "adapters" : "model",
                       engine::escaped(config_.save.folder()));
  }
  if (stop_requested() == 0) return "";
  return fmt::format(
      "no model saved (save.final is empty){}",
      checkpoint ? fmt::format("; the checkpoint of step {} has it", *checkpoint) : "");
}

}  // namespace tessera::tools

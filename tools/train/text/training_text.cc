#include "tools/train/text/training_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>

#include "engine/dtype.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/decoding/generator.h"
#include "tools/decoding/sampler.h"
#include "tools/models/key_value_cache.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kPromptsTogether = 8;

std::function<bool()> until_stopped(Trainer& trainer) {
  constexpr std::int64_t kForwardsPerLook = 16;
  return [&trainer, i = std::int64_t{0}]() mutable {
    return i++ % kForwardsPerLook != 0 || !trainer.stops();
  };
}

}  // namespace

SaidTokens said_tokens(const TokenMix& data, const std::optional<Tokenizer>& tokenizer,
                       std::int64_t vocab) {
  SaidTokens said{.vocab = std::min(vocab, data.max_possible_token() + 1),
                  .is_bytes = data.is_bytes()};
  if (tokenizer) {
    said.tokenizer = &*tokenizer;
    said.vocab = std::min(said.vocab, tokenizer->vocab_size());
  }
  return said;
}

std::vector<std::int32_t> generate(Trainer& trainer, LanguageModel& model,
                                   const std::vector<std::int32_t>& tokens, std::int64_t num_tokens,
                                   std::int64_t vocab, std::uint64_t seed) {
  Sampler sampler({.temperature = 0.8, .top_k = 40, .seed = seed}, 0);
  const TextRequest request{.prompt = tokens,
                            .next = [&](std::span<const float> scores, std::int64_t place) {
                              trainer.world().check();
                              return sampler.next(scores, place);
                            }};
  // A budget is met by a plan, which has not counted what would be kept.
  const GenerateOptions options{.num_tokens = num_tokens,
                                .vocab = vocab,
                                .keeps = trainer.config().memory_limit_nbytes() == 0,
                                .slides = true,
                                .goes_on = until_stopped(trainer)};
  std::vector<std::int32_t> all = tokens;
  generate(trainer.tape(), model, std::span(&request, 1), options,
           [&](std::size_t, const Continuation& made) {
             all.insert(all.end(), made.tokens.begin(), made.tokens.end());
           });
  return all;
}

std::string sample_text(Trainer& trainer, LanguageModel& model, const TokenMix& data,
                        const SaidTokens& said, std::int64_t num_tokens, std::uint64_t seed) {
  std::vector<std::int32_t> first(1);
  data.sources().front().file().read(0, said.vocab, first);
  const std::vector<std::int32_t> sample =
      generate(trainer, model, first, num_tokens, said.vocab, seed);
  if (said.is_bytes) return printable(std::string(sample.begin(), sample.end()));
  if (said.tokenizer != nullptr)
    return printable(said.tokenizer->decode(sample, /*skip_special=*/false));
  return fmt::format("token ids: {}", fmt::join(sample, " "));
}

ValidationPrompts read_validation_prompts(const std::string& path, const TokenDataConfig& config,
                                          const TokenMix& data, const SaidTokens& said,
                                          const ModelConfig& model, std::int64_t num_tokens) {
  constexpr std::string_view kPrefix = "data.";
  engine::require(data.num_val_sequences() > 0,
                  "[config] expected something to validate on with log.val_prompts, got none "
                  "(data.val_fraction)");
  engine::require(num_tokens > 0,
                  "[config] expected sample.tokens of at least 1 with log.val_prompts, got 0");
  engine::require(said.is_bytes || said.tokenizer != nullptr,
                  "[config] expected the tokenizer of the data with log.val_prompts, got none "
                  "(data.tokenizer)");
  ValidationPrompts asked{.said = said, .num_tokens = num_tokens};
  DocumentFields fields = config.documents.fields(kPrefix);
  fields.learns_all = false;  // else nothing would come before
  asked.prompts = read_prompts(path, fields,
                               {.tokenizer = said.tokenizer,
                                .special = config.documents.special,
                                .positions = model.seq,
                                .vocab = model.vocab});
  if (said.tokenizer == nullptr) return asked;
  const auto add = [&](const std::optional<std::int32_t>& token) {
    if (token) asked.eos.insert(*token);
  };
  add(said.tokenizer->eos());
  for (const TokenSource& source : config.sources()) add(config.ends(source, *said.tokenizer).end);
  return asked;
}

void add_continuations(Trainer& trainer, LanguageModel& model, const ValidationPrompts& asked,
                       Trainer::Validation& validation) {
  std::vector<TextRequest> requests;
  Sampler likeliest({}, 0);
  for (const Prompt& prompt : asked.prompts) {
    requests.push_back(
        {.prompt = prompt.tokens, .next = [&](std::span<const float> scores, std::int64_t place) {
           trainer.world().check();
           return likeliest.next(scores, place);
         }});
  }
  const GenerateOptions options{.num_tokens = asked.num_tokens,
                                .vocab = asked.said.vocab,
                                .eos = asked.eos,
                                .batch = asked.keeps ? kPromptsTogether : 1,
                                .keeps = asked.keeps,
                                .goes_on = until_stopped(trainer)};
  std::vector<Continuation> all(requests.size());
  generate(trainer.tape(), model, requests, options,
           [&](std::size_t i, Continuation made) { all[i] = std::move(made); });
  if (trainer.stopped_by() != 0) return;
  std::vector<std::string> records;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Prompt& prompt = asked.prompts[i];
    const std::string text = text_of(prompt, all[i], asked.said.tokenizer);
    validation.lines.push_back(fmt::format("  {} => {}", engine::excerpt(prompt.text, 60),
                                           engine::escaped(engine::without_cut_character(text))));
    records.push_back(record_of(prompt, text, all[i]).text());
  }
  validation.record.add_literal("continuations", fmt::format("[{}]", engine::join(records, ",")));
}

UnrecordedPass continuations_pass(LanguageModel& model, const ValidationPrompts& asked) {
  std::int64_t longest = 1;
  for (const Prompt& prompt : asked.prompts) longest = std::max(longest, std::ssize(prompt.tokens));
  const std::int64_t most = std::min(longest + asked.num_tokens - 1, model.max_tokens());
  const std::int64_t num_read = asked.keeps ? longest : most;
  const auto num_texts = static_cast<std::size_t>(
      std::min(kPromptsTogether, static_cast<std::int64_t>(asked.prompts.size())));
  return {"continuations",
          {{"tokens", {1, num_read}, engine::DType::kI32}},
          [&model, keeps = asked.keeps, most, num_texts](engine::Tape& tape, const Batch& batch) {
            if (!keeps) return static_cast<void>(model.next_token_logits(tape, batch[0]));
            std::vector<KeyValueCache> caches(num_texts, KeyValueCache(most));
            for (KeyValueCache& cache : caches)
              static_cast<void>(model.next_token_logits(tape, batch[0], cache));
          }};
}

std::string printable(std::string_view bytes) {
  std::string_view rest = engine::without_cut_character(bytes);
  std::string text;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find_first_of("\n\t"), rest.size());
    text += engine::escaped(rest.substr(0, end));
    if (end < rest.size()) text += rest[end];
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return text;
}

}  // namespace tessera::tools

// What a model in training says: a sample at the end, and how prompts go on after a validation.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tools/config/data/token_data_config.h"
#include "tools/data/token_mix.h"
#include "tools/decoding/prompts.h"
#include "tools/models/family.h"
#include "tools/models/language_model.h"
#include "tools/tokenizer/tokenizer.h"
#include "tools/train/trainer.h"
#include "tools/train/unrecorded_pass.h"

namespace tessera::tools {

/// Tokens that a model says, and who reads them.
struct SaidTokens {
  std::int64_t vocab = 0;                ///< tokens in [0, vocab) are drawn
  const Tokenizer* tokenizer = nullptr;  ///< null: they are bytes, or nobody knows theirs
  bool is_bytes = false;
};
/// Of a model of `vocab` tokens that is trained on `data`, which `tokenizer` reads, if one does.
SaidTokens said_tokens(const TokenMix& data, const std::optional<Tokenizer>& tokenizer,
                       std::int64_t vocab);

/// `tokens` and up to `num_tokens` more, drawn at temperature 0.8 from the 40 likeliest below
/// `vocab`; all ranks draw the same. After the last position of the model its context moves on.
/// Fewer when a rank is asked to stop. Throws InvalidArgument if a logit is NaN, or the largest is
/// infinite. Collective.
std::vector<std::int32_t> generate(Trainer& trainer, LanguageModel& model,
                                   const std::vector<std::int32_t>& tokens, std::int64_t num_tokens,
                                   std::int64_t vocab, std::uint64_t seed);
/// generate() after the first token of `data`, as text, or as a list of ids. Collective.
std::string sample_text(Trainer& trainer, LanguageModel& model, const TokenMix& data,
                        const SaidTokens& said, std::int64_t num_tokens, std::uint64_t seed);

/// What a training goes on with after each validation.
struct ValidationPrompts {
  std::vector<Prompt> prompts = {};  ///< none: with nothing
  SaidTokens said = {};
  std::int64_t num_tokens = 0;
  std::set<std::int32_t> eos = {};  ///< end a text
  bool keeps = true;                ///< see GenerateOptions::keeps
};

/// Those in the file at `path`, of a training of `model` on `data`; see read_prompts(). Throws as
/// that does, and InvalidArgument where nothing is validated or said, or nobody knows the tokens.
ValidationPrompts read_validation_prompts(const std::string& path, const TokenDataConfig& config,
                                          const TokenMix& data, const SaidTokens& said,
                                          const ModelConfig& model, std::int64_t num_tokens);

/// Adds to `validation` what the model says after each prompt, of each next token the likeliest: a
/// line each for the terminal, and "continuations" for the log, as record_of() has them. All ranks
/// read all prompts, a few together. Adds nothing when a rank is asked to stop. Collective.
void add_continuations(Trainer& trainer, LanguageModel& model, const ValidationPrompts& asked,
                       Trainer::Validation& validation);
/// What of that takes most memory.
UnrecordedPass continuations_pass(LanguageModel& model, const ValidationPrompts& asked);

/// Bytes as a terminal can show them: UTF-8 as it is, with its lines and tabs; what is none, or
/// would command the terminal, escaped. A character that the end cuts is left out.
std::string printable(std::string_view bytes);

}  // namespace tessera::tools

// A model goes on with a text of tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "engine/tape.h"
#include "tools/generate/sampler.h"
#include "tools/models/language_model.h"

namespace tessera::tools {

struct GenerateOptions {
  std::int64_t num_tokens = 0;      ///< at most
  std::int64_t vocab = 0;           ///< tokens in [0, vocab) are drawn
  std::set<std::int32_t> eos = {};  ///< end a text
  Sampling sampling = {};
};

/// Why a text ends.
enum class End { kEos, kTokens, kPositions, kStopped };
/// "eos", "tokens", "positions"; "stopped" by who uses it
std::string_view name_of(End end);

struct Continuation {
  std::vector<std::int32_t> tokens;  ///< the token that ends a text among them
  End end;
};

/// What follows `prompt`, of 1 to model.max_tokens() tokens, the one of number `number`. Each
/// token but the last is read with all that stand before it, so of a model of P positions a prompt
/// of n tokens gets P - n + 1 at most. `use` is told of each token but those that end the text, and
/// returns whether to go on. Not recorded; inside Fsdp::keep_gathered() not collective.
Continuation generate(engine::Tape& tape, LanguageModel& model,
                      std::span<const std::int32_t> prompt, std::uint64_t number,
                      const GenerateOptions& options,
                      const std::function<bool(std::int32_t token)>& use);

}  // namespace tessera::tools

// A model goes on with texts of tokens, several of them at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "engine/tape.h"
#include "tools/models/language_model.h"

namespace tessera::tools {

struct GenerateOptions {
  std::int64_t num_tokens = 0;      ///< at most
  std::int64_t vocab = 0;           ///< tokens in [0, vocab) are drawn
  std::set<std::int32_t> eos = {};  ///< end a text
  /// Texts that forwards of one token read together. 1: no text has a part in the bits of another.
  std::int64_t batch = 1;
  /// Keys and values of tokens are kept, so that each is read once; false: each token is drawn from
  /// a forward over all that stand before it, for which no other memory is taken.
  bool keeps = true;
  /// After the last position of the model a text goes on: each token is drawn from a forward over
  /// as many as there are positions, the last ones. False: it ends.
  bool slides = false;
  /// Asked before each forward whether there is another; no: the texts end as they are. Null: yes.
  std::function<bool()> goes_on = {};
};

/// Why a text ends.
enum class End { kEos, kTokens, kPositions, kStopped };
/// "eos", "tokens", "positions"; "stopped" by who uses it
std::string_view name_of(End end);

struct Continuation {
  std::vector<std::int32_t> tokens;  ///< the token that ends a text among them
  End end;
};

struct TextRequest {
  std::span<const std::int32_t> prompt;  ///< of 1 to model.max_tokens() tokens
  /// The token to stand at `place` of the text, from 0, of the `logits` of those to draw from.
  std::function<std::int32_t(std::span<const float> logits, std::int64_t place)> next;
  /// Told of each token but those that end the text; returns whether to go on. Null: yes.
  std::function<bool(std::int32_t token)> use = {};
};

/// Tells `end` what follows each prompt, by its index, when its text ends. A prompt is read in a
/// forward by itself, which has the bits of one in training; each later token but the last is read
/// with all that stand before it, so of a model of P positions a prompt of n tokens gets P - n + 1
/// at most, unless it slides. A text that ends makes place for the next. Which forwards there are
/// depends on requests, options and drawn tokens alone. Not recorded; inside Fsdp::keep_gathered()
/// not collective. Throws InvalidArgument for a prompt of another length.
void generate(engine::Tape& tape, LanguageModel& model, std::span<const TextRequest> requests,
              const GenerateOptions& options,
              const std::function<void(std::size_t text, Continuation made)>& end);

}  // namespace tessera::tools

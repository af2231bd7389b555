// Text from a model in training.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/models/language_model.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

/// `tokens` and up to `num_tokens` more, drawn at temperature 0.8 from the 40 likeliest below
/// `vocab`; all ranks draw the same. Fewer when a rank is asked to stop. Collective.
std::vector<std::int32_t> generate(Trainer& trainer, LanguageModel& model,
                                   std::vector<std::int32_t> tokens, std::int64_t num_tokens,
                                   std::int64_t vocab, std::uint64_t seed);

/// Bytes as a terminal can show them: UTF-8 as it is, with its lines and tabs; what is none, or
/// would command the terminal, escaped. A character that the end cuts is left out.
std::string printable(std::string_view bytes);

}  // namespace tessera::tools

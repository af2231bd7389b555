// Text from a model in training.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/models/gpt.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

/// `tokens` and up to `num_tokens` more, drawn at temperature 0.8 from the 40 likeliest; all ranks
/// draw the same. Fewer when a rank is asked to stop. Collective.
std::vector<std::int32_t> generate(Trainer& trainer, Gpt& gpt, std::vector<std::int32_t> tokens,
                                   std::int64_t num_tokens, std::uint64_t seed);

/// Tokens that are bytes, as a terminal can show them.
std::string printable(const std::vector<std::int32_t>& tokens);

}  // namespace tessera::tools

// How much memory a model takes that generates, before its weights are read.
#pragma once

#include <cstdint>

#include "tools/models/family.h"

namespace tessera::tools {

/// Bytes that `num_ranks` ranks hold at once when each reads a prompt of `num_tokens` tokens at
/// most, as generate() does: found by doing so on a device that is not there.
std::int64_t generating_nbytes(const ModelConfig& config, int num_ranks, std::int64_t num_tokens);

}  // namespace tessera::tools

// What data are, wherever they lie and in whatever format: a run that is resumed sees by it whether
// they have changed.
#pragma once

#include <cstdint>
#include <string>

#include "tools/data/fashion_mnist.h"
#include "tools/data/token_file.h"

namespace tessera::tools {

/// Tokens that are read for a digest at most.
inline constexpr std::int64_t kMostDigested = std::int64_t{1} << 28;

/// How many tokens there are, and a checksum of their ids: of all of them, or if there are more
/// than `most`, of 4,096 parts, evenly spaced, the first and the last among them. So what changes
/// between these is not seen. Throws IoError when the file cannot be read.
std::string digest_of(const TokenFile& tokens, std::int64_t most = kMostDigested);

/// Of all pixels and labels.
std::string digest_of(const FashionMnist& data);

}  // namespace tessera::tools

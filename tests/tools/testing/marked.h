// Documents of a prompt and what comes after it, as TokenWriter takes them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/data/token_file.h"

namespace tessera::testing {

/// `ids`, of which the first `num_not_learned` are not learned.
inline std::vector<std::uint32_t> marked(std::span<const std::int32_t> ids,
                                         std::int64_t num_not_learned) {
  std::vector<std::uint32_t> tokens;
  for (const std::int32_t id : ids) {
    const bool is_learned = std::ssize(tokens) >= num_not_learned;
    tokens.push_back(static_cast<std::uint32_t>(id) | (is_learned ? 0 : tools::kNotLearned));
  }
  return tokens;
}

}  // namespace tessera::testing

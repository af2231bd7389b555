// How much memory a model takes that generates, before its weights are read.
#pragma once

#include <cstdint>

#include "engine/dtype.h"
#include "tools/models/family.h"

namespace tessera::tools {

struct GeneratingNeed {
  int num_ranks = 1;
  std::int64_t num_tokens = 1;  ///< of the longest prompt
  std::int64_t num_kept = 1;    ///< whose keys and values a text keeps in the end, those among them
  std::int64_t num_texts = 1;   ///< that a rank goes on with together
  engine::DType param = engine::DType::kF32;  ///< what is computed in
};

/// Bytes that the ranks hold at once, as generate() does: found by doing so on a device that is not
/// there.
std::int64_t generating_nbytes(const ModelConfig& config, const GeneratingNeed& need);

}  // namespace tessera::tools

// Which kernels compute attention, as cuda.attention says.
#pragma once

#include "tools/programs/transformer_config.h"

namespace tessera::tools {

/// Throws InvalidArgument for kernels that the device never has. What a GPU has is known on it
/// alone: see ops::require_attention_kernels().
void check_attention(const TransformerConfig& config, bool on_gpus);

}  // namespace tessera::tools

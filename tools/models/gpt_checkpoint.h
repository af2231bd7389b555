// A sharded Gpt from and to a folder in the Hugging Face GPT-2 layout; see gpt2_files.h.
#pragma once

#include <string>

#include "comm/process_group.h"
#include "shard/fsdp.h"
#include "tools/io/gpt2_files.h"
#include "tools/models/gpt.h"

namespace tessera::tools {

/// What config.json says of such a model.
Gpt2FileConfig gpt2_file_config(const GptConfig& config);

/// Sizes of the model in `folder`; dropout is 0. Throws IoError naming file and key.
GptConfig read_gpt_config(const std::string& folder);

/// Sets all parameters of `gpt`, which `fsdp` wraps, each rank its part. Not collective. Throws
/// IoError that lists every tensor that is missing, unexpected or of another shape.
void load_gpt(shard::Fsdp& fsdp, const Gpt& gpt, const std::string& folder);

/// Throws IoError if `folder` cannot be made or written to, or what is there cannot be replaced:
/// before training, not after.
void check_can_save_gpt(const std::string& folder);

/// Collective over `world`, whose rank 0 writes, however long the disk takes. Throws IoError.
void save_gpt(shard::Fsdp& fsdp, const Gpt& gpt, const std::string& folder,
              comm::ProcessGroup& world);

}  // namespace tessera::tools

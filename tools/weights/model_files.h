// A sharded model from and to a folder as Hugging Face transformers has them.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/process_group.h"
#include "shard/fsdp.h"
#include "tools/huggingface/model_writer.h"
#include "tools/models/language_model.h"

namespace tessera::tools {

/// Sets all parameters of `model`, which `fsdp` wraps. Each rank reads its part of the files and no
/// more. Not collective. Throws IoError that lists every tensor that is missing, unexpected or of
/// another shape.
void load_model(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder);

/// Throws IoError if `folder` cannot be made or written to, or what is there cannot be replaced:
/// before training, not after.
void check_can_save_model(LanguageModel& model, const std::string& folder,
                          const SaveOptions& options);

/// Collective over `world`, whose rank 0 writes, however long the disk takes. Throws IoError.
void save_model(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder,
                comm::ProcessGroup& world, const SaveOptions& options = {});

/// For a save without Fsdp: a writer of `parameters`, which are then all written in that order.
std::unique_ptr<ModelWriter> model_writer(const LanguageModel& model, const std::string& folder,
                                          std::span<engine::Parameter* const> parameters,
                                          const SaveOptions& options = {});
void write_parameter(ModelWriter& writer, const LanguageModel& model, const engine::Parameter& p,
                     std::span<const float> values);

}  // namespace tessera::tools

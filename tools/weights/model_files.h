// A sharded model from and to a folder as Hugging Face transformers has them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "comm/process_group.h"
#include "shard/fsdp.h"
#include "tools/huggingface/model_writer.h"
#include "tools/models/language_model.h"
#include "tools/weights/adapter_files.h"

namespace tessera::tools {

/// Sets all parameters of `model`, which `fsdp` wraps, but adapters; with `delta` to weights that
/// have it added. Each rank reads its part of the files and no more. Not collective. Throws IoError
/// that lists every tensor that is missing, unexpected or of another shape.
void load_model(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder,
                const LoraDelta* delta = nullptr);

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
/// Adds what adapters add to the whole of a parameter.
void add_delta(const LoraDelta& delta, const LanguageModel& model, const engine::Parameter& p,
               std::span<float> values);
/// The model in `from`, with `delta` added, to `to`: one parameter after the other, of which
/// `progress` is told. Throws as load_model() and ModelWriter.
void merge_model(LanguageModel& model, const std::string& from, const LoraDelta& delta,
                 const std::string& to, const SaveOptions& options,
                 const std::function<void(std::int64_t numel)>& progress);

}  // namespace tessera::tools

// Whether this machine's memory holds a training of train_transformer, from its options alone.
#pragma once

#include "tools/launch/ranks.h"
#include "tools/models/language_model.h"
#include "tools/programs/run/memory_check.h"
#include "tools/programs/transformer_config.h"

namespace tessera::tools {

/// memory_shortage() of a training of `config`, which is `asked` or what a budget made of it, and
/// of a `model` of asked.model_config(). None on GPUs, which may be another machine's, or for more
/// ranks than a trainer has.
MemoryShortage transformer_shortage(const TransformerConfig& asked, const TrainConfig& config,
                                    LanguageModel& model, const Ranks& ranks);

}  // namespace tessera::tools

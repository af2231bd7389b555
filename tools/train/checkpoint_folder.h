// Where checkpoints of a run go, looked at before ranks start.
#pragma once

#include "tools/config/checkpoint_config.h"
#include "tools/config/train_config.h"

namespace tessera::tools {

/// Makes nothing. Throws IoError that names the option unless checkpoint.dir, if it is used, is a
/// folder or can be made one.
void check_checkpoint_folder(const TrainConfig& config);

/// Throws InvalidArgument that says what is there if what is resumed is a folder and neither a
/// checkpoint nor one of checkpoints: the folder of a run or of several, above their checkpoints,
/// of a model, an empty one.
void check_resumed_folder(const CheckpointConfig& config);

}  // namespace tessera::tools

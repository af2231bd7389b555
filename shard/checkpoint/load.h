// Loads a checkpoint, whatever ranks and strategy wrote it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "shard/checkpoint/pieces.h"

namespace tessera::shard {

struct LoadOptions {
  /// False: states of optimizers and hooks, averages, and parameter groups that are missing stay as
  /// they are, and those that nobody has are ignored; LoadedCheckpoint::differences says which. An
  /// optimizer of whose states there is none counts its steps from 0.
  bool strict = true;
  /// Parameter groups take their values from the checkpoint, and LoadedCheckpoint::changed says
  /// which had others. False: they keep their own.
  bool groups = true;
};

struct LoadedCheckpoint {
  std::string path;
  std::int64_t step = 0;
  std::string run;
  int ranks = 1;                              ///< that wrote it
  std::map<std::string, std::string> values;  ///< see Manifest
  std::vector<std::string> differences = {};  ///< a line each
  /// The program's own settings of parameter groups that the checkpoint replaced by other values, a
  /// line each.
  std::vector<std::string> changed = {};
};

/// Collective over `world`, which all groups of `parts` are of. Each rank reads what it owns, in
/// chunks of 4 MiB; of what hooks remember, all of it. Throws on every rank alike: IoError naming
/// rank, file and tensor if something is damaged or missing, or is another on some rank, and
/// InvalidArgument listing all differences between what is saved and `parts`. Until an IoError of
/// damaged bytes values may have been overwritten: load another checkpoint, or end.
LoadedCheckpoint load_checkpoint(comm::ProcessGroup& world, std::span<const CheckpointPart> parts,
                                 const std::string& path, const LoadOptions& options = {});

/// Loads the newest of the checkpoints in `folder` that verifies and is of the step that its name
/// says. `warn` is told of each newer one that is passed over, and each line of
/// LoadedCheckpoint::changed; `rejected`, if not null, the steps of those passed over. Nothing if
/// there are no checkpoints. Throws as load_checkpoint(), but IoError if there are some and none
/// verifies.
std::optional<LoadedCheckpoint> load_newest_checkpoint(
    comm::ProcessGroup& world, std::span<const CheckpointPart> parts, const std::string& folder,
    const LoadOptions& options = {}, const std::function<void(std::string_view)>& warn = {},
    const std::function<void(std::int64_t step)>& rejected = {});

}  // namespace tessera::shard

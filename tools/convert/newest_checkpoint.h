// The checkpoint to read where a run may be removing old ones at the same time.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "engine/error.h"

namespace tessera::tools {

/// What a checkpoint holds is damaged: another one may be read in its place.
class DamagedCheckpoint : public engine::IoError {
 public:
  using IoError::IoError;
};

/// Whether `path` is a checkpoint, or a folder of some.
bool has_checkpoint(const std::string& path);

/// Calls `read` with the checkpoint that `path` is, or with the newest of those in it, until it
/// returns. Of those in a folder, one that throws DamagedCheckpoint or is not of the step of its
/// name is passed over, of which `warn` is told. If `read` throws IoError and the checkpoint is
/// gone by then, the one that is the newest now follows. Throws IoError, with what `read` did, if
/// `path` itself is the checkpoint, or if none is left.
void read_newest(const std::string& path, const std::function<void(const std::string&)>& read,
                 const std::function<void(std::string_view)>& warn = {});

}  // namespace tessera::tools

// The checkpoint to read where a run may be removing old ones at the same time.
#pragma once

#include <functional>
#include <string>

namespace tessera::tools {

/// The checkpoint that `path` is, or the newest of the checkpoints in it; empty if there is none.
std::string newest_checkpoint(const std::string& path);

/// Calls `read` with newest_checkpoint(path), which is not empty. If that throws IoError and the
/// checkpoint is gone by then, calls it with the one that is the newest now. Throws IoError, with
/// what `read` did, if `path` itself was the checkpoint, or if there is none any more.
void read_newest(const std::string& path, const std::function<void(const std::string&)>& read);

}  // namespace tessera::tools

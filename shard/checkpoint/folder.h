// The folder that holds the checkpoints of a run:
//
//   step_10/          a checkpoint: whole, since its name is given last
//   step_20/
//   step_30.tmp-N/    one that is being written, or was when its process died
//   latest            "step_20", for scripts; a reader goes by what verifies
//   .lock             held by the run that writes here
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/file.h"

namespace tessera::shard {

/// Steps of the checkpoints in `folder`, the newest first. None if it is not there; throws IoError
/// if it is and cannot be read.
std::vector<std::int64_t> steps_in(const std::string& folder);
/// The path of the checkpoint of `step`.
std::string checkpoint_path(const std::string& folder, std::int64_t step);
/// The step of a name like step_120; nothing for any other name.
std::optional<std::int64_t> step_of_name(std::string_view name);
/// The step that the manifest of checkpoint_path(folder, step) says, if that is another one: the
/// folder was copied or renamed. Nothing if it is the same, or cannot be read.
std::optional<std::int64_t> misnamed_step(const std::string& folder, std::int64_t step);
/// "step_99 is in fact the checkpoint of step 10 (PATH)"
std::string misnamed_text(const std::string& path, std::int64_t step);
/// Where the files of `step` are written before it is whole; `nonce` tells attempts apart.
std::string temporary_path(const std::string& folder, std::int64_t step, std::uint64_t nonce);

/// The folder, for the one rank that gives and takes names in it.
class CheckpointFolder {
 public:
  /// Makes `folder` if need be, and removes what died while it was written or removed. Throws
  /// IoError if that fails, or if another run writes there.
  explicit CheckpointFolder(std::string folder);

  /// The files in `temporary` are all written and flushed: adds the manifest, and gives the folder
  /// the name of `step`, which lasts through a power cut when this returns. Throws IoError; then
  /// there is no checkpoint of `step`.
  void publish(const std::string& temporary, std::int64_t step, std::string_view manifest);
  /// Returns why `latest`, which nothing depends on, could not be replaced, if so.
  std::string set_latest(std::int64_t step);
  /// Removes `temporary`, as far as that works.
  static void remove(const std::string& temporary) noexcept;
  /// Removes all but the newest `keep` checkpoints, the oldest first; 0: none. Those of `rejected`
  /// steps do not count, and stay. Returns the errors.
  std::vector<std::string> prune(int keep, const std::set<std::int64_t>& rejected);
  /// Renames the checkpoint that has the name of `step` but is damaged or of another step. Throws
  /// IoError.
  void set_aside(std::int64_t step);

 private:
  std::string folder_;
  engine::FileDescriptor lock_;
};

}  // namespace tessera::shard

#include "tools/train/checkpoint_folder.h"

#include <unistd.h>

#include <cerrno>
#include <climits>
#include <filesystem>
#include <string>
#include <system_error>

#include "engine/error.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/manifest.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

void check_checkpoint_folder(const TrainConfig& config) {
  namespace fs = std::filesystem;
  const CheckpointConfig& checkpoint = config.checkpoint;
  if (!checkpoint.saves() && checkpoint.resume != "auto") return;
  const fs::path folder = checkpoint.folder(config.out);
  const auto expect = [&](bool is_fine, const std::string& reason) {
    engine::require<engine::IoError>(
        is_fine, "[checkpoint] expected a folder for checkpoints, got {} (checkpoint.dir, {})",
        reason, folder.string());
  };
  const auto reason = [](int error) { return std::generic_category().message(error); };
  for (const fs::path& name : folder) {
    expect(name.native().size() <= NAME_MAX, reason(ENAMETOOLONG));
  }
  // What is there of it.
  std::error_code error;
  fs::path there = folder;
  while (fs::status(there, error).type() == fs::file_type::not_found && there.has_parent_path() &&
         there.parent_path() != there) {
    there = there.parent_path();
  }
  const fs::file_status status = fs::status(there, error);
  if (status.type() == fs::file_type::not_found) return;  // of a relative path, made where we are
  expect(status.type() != fs::file_type::none, error.message());
  expect(fs::is_directory(status), reason(ENOTDIR));
  const bool can_write = !checkpoint.saves() || ::access(there.c_str(), W_OK | X_OK) == 0;
  expect(can_write, reason(errno));
}

void check_resumed_folder(const CheckpointConfig& config) {
  namespace fs = std::filesystem;
  if (!config.resumes() || config.resume == "auto") return;
  const std::string path = resolve_user_path(config.resume), inside = path + "/checkpoints";
  std::error_code ignored;
  if (fs::exists(path + "/" + shard::kManifestName, ignored) || !fs::is_directory(path, ignored) ||
      !fs::is_directory(inside, ignored) || !shard::steps_in(path).empty()) {
    return;
  }
  engine::require(shard::steps_in(inside).empty(),
                  "[checkpoint] expected a checkpoint or a folder of checkpoints, got the folder "
                  "of a run, whose checkpoints --resume={} goes on from (resume, {})",
                  (fs::path(config.resume) / "checkpoints").string(), path);
}

}  // namespace tessera::tools

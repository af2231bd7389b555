#include "tools/train/checkpoint_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/manifest.h"
#include "tools/cli/flags.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

bool has(const fs::path& folder, const char* name) {
  std::error_code ignored;
  return fs::exists(folder / name, ignored);
}

// Or was one: a damaged one may have its name alone.
bool is_one_checkpoint(const fs::path& path) {
  return has(path, shard::kManifestName) ||
         shard::step_of_name(fs::weakly_canonical(path).filename().string());
}

bool has_checkpoints(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_directory(folder, ignored) && !shard::steps_in(folder.string()).empty();
}

// What the folder `path`, `typed` by a person, is that has no checkpoint, and what to do with it;
// empty where it cannot be read.
std::string found_instead(const fs::path& path, const std::string& typed) {
  const auto inside = [&](const fs::path& name) { return (fs::path(typed) / name).string(); };
  if (has_checkpoints(path / "checkpoints")) {
    return fmt::format("the folder of a run, whose checkpoints --resume={} goes on from",
                       inside("checkpoints"));
  }
  if (has(path, "config.json") || has(path, "model.safetensors") ||
      has(path, "model.safetensors.index.json")) {
    return fmt::format("the folder of a model, from which --init.from={} begins a new run", typed);
  }
  std::error_code error;
  std::vector<std::string> runs;
  bool is_empty = true;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    is_empty = false;
    const fs::path name = entry->path().filename();
    for (const fs::path& below : {name, name / "checkpoints"}) {
      if (has_checkpoints(path / below)) runs.push_back(inside(below));
    }
  }
  if (error) return "";
  if (is_empty) return "an empty folder";
  if (runs.empty()) return "a folder that has neither a manifest.json nor a step_*";
  std::ranges::sort(runs);
  return fmt::format("a folder of runs, such as the one whose checkpoints --resume={} goes on from",
                     runs.front());
}

}  // namespace

void check_checkpoint_folder(const TrainConfig& config) {
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
  if (!config.resumes() || config.resume == "auto") return;
  const fs::path path = resolve_user_path(config.resume);
  std::error_code error;
  const bool is_folder = fs::is_directory(path, error);
  if (!is_folder || is_one_checkpoint(path) || has_checkpoints(path)) return;
  const std::string found = found_instead(path, config.resume);
  engine::require(found.empty(),
                  "[checkpoint] expected a checkpoint or a folder of checkpoints, got {} (resume, "
                  "{})",
                  found, path.string());
}

}  // namespace tessera::tools

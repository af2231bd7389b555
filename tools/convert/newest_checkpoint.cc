#include "tools/convert/newest_checkpoint.h"

#include <cstdint>
#include <filesystem>
#include <system_error>
#include <vector>

#include "engine/error.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/manifest.h"

namespace tessera::tools {
namespace {

bool has_manifest(const std::string& path, std::error_code& error) {
  return std::filesystem::exists(path + "/" + shard::kManifestName, error);
}

}  // namespace

std::string newest_checkpoint(const std::string& path) {
  std::error_code ignored;
  if (has_manifest(path, ignored)) return path;
  const std::vector<std::int64_t> steps = shard::steps_in(path);
  return steps.empty() ? "" : shard::checkpoint_path(path, steps.front());
}

void read_newest(const std::string& path, const std::function<void(const std::string&)>& read) {
  for (std::string checkpoint = newest_checkpoint(path);;) {
    try {
      return read(checkpoint);
    } catch (const engine::IoError& e) {
      std::error_code error;
      if (has_manifest(checkpoint, error) || error) throw;
      // Files that were open could be read on: that one was missing is the only way to notice.
      const std::string newest = newest_checkpoint(path);
      engine::require<engine::IoError>(
          !newest.empty() && newest != checkpoint,
          "[checkpoint] expected a checkpoint that stays while it is read, got one that is gone, "
          "as its run keeps the newest alone ({}): {}",
          checkpoint, e.what());
      checkpoint = newest;
    }
  }
}

}  // namespace tessera::tools

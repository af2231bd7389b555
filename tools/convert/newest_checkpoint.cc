#include "tools/convert/newest_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <vector>

#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/manifest.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

bool is_there(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error) || error;
}

bool has_manifest(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path + "/" + shard::kManifestName, ignored);
}

}  // namespace

bool has_checkpoint(const std::string& path) {
  return has_manifest(path) || !shard::steps_in(path).empty();
}

void read_newest(const std::string& path, const std::function<void(const std::string&)>& read,
                 const std::function<void(std::string_view)>& warn) {
  const bool is_one = has_manifest(path);
  std::set<std::int64_t> passed_over;
  std::string errors;
  const auto pass_over = [&](std::int64_t step, const std::string& why) {
    passed_over.insert(step);
    errors += "\n  " + why;
    if (warn) warn("passed over: " + why);
  };
  for (;;) {
    std::string checkpoint = path;
    std::int64_t step = 0;
    if (!is_one) {
      const std::vector<std::int64_t> steps = shard::steps_in(path);
      const auto newest =
          std::ranges::find_if_not(steps, [&](std::int64_t s) { return passed_over.contains(s); });
      require<IoError>(newest != steps.end(),
                       "[checkpoint] expected a checkpoint that verifies, got none{}\n  ({})",
                       errors, path);
      step = *newest;
      checkpoint = shard::checkpoint_path(path, step);
      if (const auto other = shard::misnamed_step(path, step)) {
        pass_over(step, shard::misnamed_text(checkpoint, *other));
        continue;
      }
    }
    try {
      return read(checkpoint);
    } catch (const IoError& e) {
      if (!is_there(checkpoint)) {
        // Files that were open could be read on: that one was missing is the only way to notice.
        require<IoError>(!is_one && !shard::steps_in(path).empty(),
                         "[checkpoint] expected a checkpoint that stays while it is read, got one "
                         "that is gone, as its run keeps the newest alone ({}): {}",
                         checkpoint, e.what());
      } else if (!is_one && dynamic_cast<const DamagedCheckpoint*>(&e) != nullptr) {
        pass_over(step, e.what());
      } else {
        throw;
      }
    }
  }
}

}  // namespace tessera::tools

#include "tools/config/data/data_path.h"

#include <filesystem>
#include <system_error>

#include "engine/error.h"
#include "engine/io/runfiles.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

std::string data_path(const std::string& option, const std::string& supplied,
                      std::string_view how_to_get) {
  if (!option.empty()) return resolve_user_path(option);
  std::error_code ignored;
  if (std::filesystem::exists(supplied, ignored)) return supplied;
  const std::string built_with = engine::find_runfile("/proc/self/exe", supplied);
  require<IoError>(!built_with.empty(),
                   "[data.path] expected a path, or to be started by `bazel run`, which supplies "
                   "{}, got neither; {}",
                   supplied, how_to_get);
  return built_with;
}

}  // namespace tessera::tools

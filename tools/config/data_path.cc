#include "tools/config/data_path.h"

#include <filesystem>
#include <system_error>

#include "engine/error.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

std::string data_path(const std::string& option, const std::string& supplied,
                      std::string_view how_to_get) {
  if (!option.empty()) return resolve_user_path(option);
  std::error_code ignored;
  require<IoError>(std::filesystem::exists(supplied, ignored),
                   "[data.path] expected a path, or to be started by `bazel run`, which supplies "
                   "{}, got neither; {}",
                   supplied, how_to_get);
  return supplied;
}

}  // namespace tessera::tools

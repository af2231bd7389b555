#include "tools/machine/environment_variable.h"

#include <cstdlib>

namespace tessera::tools {

std::optional<std::string> environment_variable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace tessera::tools

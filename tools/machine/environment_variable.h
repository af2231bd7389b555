// One variable of the environment of this process, for the rooms that need no more.
#pragma once

#include <optional>
#include <string>

namespace tessera::tools {

/// The value of a variable of this process; nothing where it is not set.
std::optional<std::string> environment_variable(const std::string& name);

}  // namespace tessera::tools

#include "engine/io/host.h"

#include <unistd.h>

#include <array>

namespace tessera::engine {

std::string host_name() {
  std::array<char, 65> name{};  // what Linux has room for
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "?";
  return name.data();
}

}  // namespace tessera::engine

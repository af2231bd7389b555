#include "tools/machine/cpu_model.h"

#include <cstddef>
#include <fstream>

namespace tessera::tools {

std::string cpu_model(const std::string& root) {
  std::ifstream info(root + "/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

}  // namespace tessera::tools

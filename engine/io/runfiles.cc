#include "engine/io/runfiles.h"

#include <system_error>

namespace tessera::engine {

namespace fs = std::filesystem;

fs::path find_runfile(const fs::path& program, const fs::path& file) {
  std::error_code error;
  const fs::path built = fs::canonical(program, error);
  if (error) return {};
  for (const auto& repository : fs::directory_iterator(built.string() + ".runfiles", error)) {
    if (fs::exists(repository.path() / file, error)) return repository.path() / file;
  }
  return {};
}

}  // namespace tessera::engine

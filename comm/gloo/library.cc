#include "comm/gloo/library.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "comm/gloo/gloo_transport.h"
#include "engine/error.h"
#include "engine/io/runfiles.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using engine::DeviceError;

constexpr const char* kName = "libtessera_gloo.so";

}  // namespace

const gloo_plugin::Functions& load_gloo_plugin(const std::string& path) {
  const std::string where = path.empty() ? kName : path;
  void* handle = dlopen(where.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* error = dlerror();
    engine::fail<DeviceError>(
        "[gloo] expected Tessera's plug-in for Gloo, got: {} (it is built where Gloo's headers "
        "are, "
        "Debian's libgloo-dev, and needs Gloo itself, libgloo0)",
        error != nullptr ? error : "no reason");
  }
  const auto entry = reinterpret_cast<gloo_plugin::Entry>(dlsym(handle, gloo_plugin::kEntry));
  engine::require<DeviceError>(entry != nullptr,
                               "[gloo] expected {} to be Tessera's plug-in for Gloo, got no {}",
                               where, gloo_plugin::kEntry);
  const gloo_plugin::Functions& functions = *entry();
  engine::require<DeviceError>(
      functions.version == gloo_plugin::Functions::kVersion,
      "[gloo] expected a plug-in of version {}, got {} ({}): it belongs to another Tessera",
      gloo_plugin::Functions::kVersion, functions.version, where);
  return functions;
}

std::string find_gloo_plugin(const fs::path& program) {
  std::error_code error;
  const fs::path file = fs::canonical(program, error);
  if (error) return {};
  const auto is_there = [&](const fs::path& path) { return fs::is_regular_file(path, error); };
  for (const fs::path& folder : {file.parent_path(), file.parent_path().parent_path() / "lib"}) {
    if (is_there(folder / kName)) return folder / kName;
  }
  return engine::find_runfile(file, fs::path("comm") / kName);
}

}  // namespace tessera::comm

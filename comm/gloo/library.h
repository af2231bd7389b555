// The plug-in for Gloo, found when it is first needed. Private to comm.
#pragma once

#include <string>

#include "comm/gloo/plugin.h"

namespace tessera::comm {

/// The functions of a plug-in, which stays loaded for good. Without a path: libtessera_gloo.so as
/// the loader finds it. Throws DeviceError if it, or Gloo itself, is not there, or if it is of
/// another version.
const gloo_plugin::Functions& load_gloo_plugin(const std::string& path);

}  // namespace tessera::comm

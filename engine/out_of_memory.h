// The error of memory that has run out, for whoever can say what takes it.
#pragma once

#include "engine/error.h"

namespace tessera::engine {

/// A device or the host has no memory left, or a limit on it is reached.
class OutOfMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

}  // namespace tessera::engine

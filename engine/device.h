// Where memory lives and work runs. A value.
#pragma once

#include <string>

namespace tessera::engine {

enum class DeviceKind { kCpu };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

inline std::string to_string(const Device& device) { return "cpu:" + std::to_string(device.index); }

}  // namespace tessera::engine

// Where memory lives and work runs. A value.
#pragma once

// The lowest header: here a compiler set to an older standard stops, at a file that is not there,
// since after an #error it would go on and tell of every template in this repository.
#if __cplusplus < 202002L
#include "Tessera needs C++20: with Bazel, `build --cxxopt=-std=c++20` in .bazelrc; elsewhere -std=c++20"
#endif

#include <string>
#include <string_view>

namespace tessera::engine {

/// Whether this build has the CUDA engine. Code that names CUDA functions is instantiated only
/// then.
#if defined(TESSERA_CUDA)
inline constexpr bool kCudaBuilt = true;
#else
inline constexpr bool kCudaBuilt = false;
#endif

enum class DeviceKind {
  kCpu,
  kCuda,
  kPinned,  ///< page-locked host memory: the CPU reads it, and GPU `index` copies from and to it
};

constexpr std::string_view name_of(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda";
    case DeviceKind::kPinned:
      return "pinned";
  }
  return "?";
}

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  /// Only the books of such a device are kept: its memory has addresses and nothing behind them,
  /// and what is launched takes simulated time and is not run. See meta.h.
  bool is_meta = false;

  /// Works behind the host's back, as a GPU does.
  bool is_cuda() const { return kind == DeviceKind::kCuda; }
  /// May the CPU read and write memory of this device?
  bool is_host() const { return kind != DeviceKind::kCuda && !is_meta; }

  friend bool operator==(const Device&, const Device&) = default;
};

inline std::string to_string(const Device& device) {
  return (device.is_meta ? "meta " : "") + std::string(name_of(device.kind)) + ":" +
         std::to_string(device.index);
}

}  // namespace tessera::engine

// Kernels on the emulated device in any order of threads.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "tests/emulator/device.h"

namespace tessera::cuda_emulation {

inline constexpr std::uint64_t kSeeds = 12;  // 0 is the natural order

template <class... Params, class... Args>
void run(const GridShape& shape, std::uint64_t seed, void (*kernel)(Params...), Args... args) {
  run_grid(kernel_symbols(reinterpret_cast<const void*>(kernel)), shape, seed,
           [&] { kernel(args...); });
}

template <class... Params, class... Args>
std::string error_of(const GridShape& shape, std::uint64_t seed, void (*kernel)(Params...),
                     Args... args) {
  try {
    run(shape, seed, kernel, args...);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::cuda_emulation

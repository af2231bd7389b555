// Kernels on the emulated device in any order of threads, and the races that they have.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "tests/cuda_emulation/races.h"
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

/// Races reported while `fn` runs.
inline int races_of(const std::function<void()>& fn) {
  const int before = num_races;
  fn();
  return num_races - before;
}

// A test that reports a race it does not provoke fails.
class DeviceTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(num_races - num_races_before_, expected_races_); }
  void expect_races(const std::function<void()>& fn) {
    const int races = races_of(fn);
    expected_races_ += races;
    EXPECT_GE(races, kSeesRaces ? 1 : 0);
  }

 private:
  int num_races_before_ = num_races;
  int expected_races_ = 0;
};

}  // namespace tessera::cuda_emulation

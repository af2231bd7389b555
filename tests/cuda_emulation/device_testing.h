// The races that kernels have on the emulated device. Include it in one file of a program.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "tests/cuda_emulation/races.h"
#include "tests/cuda_emulation/seeded_runs.h"
#include "tests/emulator/device.h"

namespace tessera::cuda_emulation {

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

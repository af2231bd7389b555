// Numbers that each rank has some of, such as losses and how many they are of.
#pragma once

#include <array>
#include <cstdint>

#include "comm/process_group.h"
#include "engine/tape.h"

/// Collective: the sums over all ranks, in f32 and in the order of ranks. Blocks until they are
/// here. Counts are exact up to 2^24.
template <std::size_t N>
std::array<float, N> sum_over_ranks(tessera::comm::ProcessGroup& world,
                                    const tessera::engine::Tape& tape, std::array<float, N> mine) {
  const auto sums = tessera::engine::Tensor::from<float>(
      tape.memory(), {static_cast<std::int64_t>(N)}, mine, "sums");
  world.all_reduce(sums, sums, tessera::comm::Accumulate::kNo, tape.stream(), "sums");
  sums.copy_to_host(mine.data());
  return mine;
}

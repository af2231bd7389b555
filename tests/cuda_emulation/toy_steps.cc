// Trains the toy model on two emulated GPUs and prints a hash of all that it leaves:
//   toy_steps STRATEGY [WAIT DELAY_MS]
// WAIT, as Wait::text() has it, is taken away, and what it covers is late.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "tests/emulator/control.h"
#include "tests/shard/toy_training.h"

namespace tessera {
namespace {

int run(const char* strategy) {
  const testing::Training run{.ranks = 2,
                              .accum = 2,
                              .steps = 2,
                              .blocks = 3,
                              .numel = 100,
                              .poison = true,
                              .options = {.placement = shard::Placement::preset(strategy)},
                              .num_gpus = 2};
  std::vector<std::uint64_t> hashes(2);
  try {
    comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
      cuda_emulation::label_thread(fmt::format("rank{}", world.rank()));
      const std::vector<float> all = testing::train_rank(world, run);
      hashes[static_cast<std::size_t>(world.rank())] =
          engine::fnv1a({reinterpret_cast<const char*>(all.data()), all.size() * sizeof(float)});
    });
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  fmt::print("{:016x} {:016x}\n", hashes[0], hashes[1]);
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) return 2;
  if (argc == 4) tessera::cuda_emulation::remove_wait(std::string(argv[2]), std::atof(argv[3]));
  return tessera::run(argv[1]);
}

// Tessera's training step in PyTorch, in a process of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/bench/training/training.h"
#include "tools/rates/timing.h"

namespace tessera::tools {

/// Runs a program, found by PATH or by its path, and returns what it wrote to stdout; stderr is
/// ours. Throws IoError naming the program if it cannot be started or fails.
std::string run_program(const std::vector<std::string>& arguments);

struct Peer {
  std::string python, script;  ///< tools/bench/peers/torch_gpt.py
  bool compile = false;        ///< torch.compile
  std::int64_t limit_s = 0;    ///< ended after so long; 0: never
};

struct PeerRun {
  Measurement step_ms;
  double peak_mib = 0;  ///< that a rank's process held in these steps; NaN where nobody knows
};

/// Runs the peer on `row`: the same steps on the same device with as many ranks, fully_shard where
/// the strategy cuts a state, else DistributedDataParallel; of a family that is not GPT-2 a Llama
/// of the Python package transformers. Throws IoError if it fails or prints something else.
PeerRun run_peer(const Peer& peer, const TrainingRow& row, std::int64_t num_steps);

}  // namespace tessera::tools

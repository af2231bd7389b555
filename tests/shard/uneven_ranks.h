// Training of ranks that do not all do the same: what tests of it share.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/toy_rank.h"

namespace tessera::testing {

// Ranks that wait for each other for ever fail before the test does.
inline const comm::ThreadsOptions kSoon{.deadline = std::chrono::seconds(20)};

inline shard::FsdpOptions with(const std::string& strategy) {
  return {.placement = shard::Placement::preset(strategy)};
}

/// One rank and its optimizer; `result` is what its steps and its parameters have become.
struct UnevenRank : ToyRank {
  UnevenRank(comm::ProcessGroup& world, const shard::FsdpOptions& options)
      : ToyRank(world, options, {.blocks = 4}) {}

  /// A forward and a backward that know the batch by its number.
  void run(int batch, bool recompute = false, int rounds = 1) {
    std::vector<float> values(static_cast<std::size_t>(numel));
    const engine::RandomStream random{7, static_cast<std::uint64_t>(batch)};
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
    const auto x = engine::Tensor::from<float>(memory, {numel}, values, "x");
    tape.backward(model.loss(tape, x, recompute, rounds));
  }
  void update() {
    const shard::GradNorm norm = fsdp.finish_step();
    result.push_back(norm.value());
    optimizer.step(1e-2, norm, /*max_norm=*/5);
  }
  std::vector<float> take() {
    const std::vector<float> all = values(&optimizer);
    result.insert(result.end(), all.begin(), all.end());
    return std::move(result);
  }

  shard::Sgd optimizer{fsdp, {.momentum = 0.9}};
  std::vector<float> result;
};

}  // namespace tessera::testing

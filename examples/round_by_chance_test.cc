// Trains with the hook of round_by_chance.h, on gradients that bf16 does not have: their mean is
// right, half the bytes are sent, and strategies and a run that goes on have equal bits.
#include "round_by_chance.h"

#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/tape.h"
#include "ops/linear.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;

constexpr std::uint64_t kSteps = 128;
constexpr std::int64_t kMicroSteps = 2, kRanks = 4, kNumel = 512;
constexpr float kGradient = 1 + 0x1p-10f;  // bf16 has 1 and 1 + 2^-7

struct Result {
  std::vector<float> weight;
  std::int64_t bytes_sent = 0;  // by rank 0
};

// Trains from `begin`, where the weights are `first`, until `end`.
Result train(const std::string& strategy, bool rounds, std::uint64_t begin, std::uint64_t end,
             const std::vector<float>& first) {
  Result result;
  comm::run_ranks(kRanks, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
    engine::Parameter weight{"fc.weight", {8, kNumel / 8}, engine::Init::zeros()};
    engine::Block block{"fc", {&weight}};
    std::uint64_t step = begin;
    shard::FsdpOptions options{.placement = shard::Placement::preset(strategy)};
    if (rounds) {
      options.reducer = [&](const shard::ReducerContext& context) {
        return std::make_unique<RoundByChance>(context, step);
      };
      options.reducer_text = "round by chance";
    }
    shard::Fsdp fsdp(world, memory, tape.stream(), {&block}, /*root=*/nullptr, options);
    shard::Sgd optimizer(fsdp, {});
    fsdp.load(weight, first);
    const auto x = engine::Tensor::from<float>(memory, {1, 8}, std::vector(8, kGradient), "x");
    for (; step < end; ++step) {
      for (int micro = 0; micro < kMicroSteps; ++micro) {
        micro == 0 ? fsdp.begin_step(kMicroSteps) : fsdp.next_micro_step();
        tape.backward(tape.region(
            block, [&] { return ops::sum(tape, ops::linear(tape, x, weight, /*bias=*/nullptr)); }));
      }
      optimizer.step(/*lr=*/1.0 / kSteps, fsdp.finish_step(), /*max_norm=*/0);
    }
    const auto whole = fsdp.full_parameter(weight);
    if (world.rank() == 0) result = {whole, world.traffic().bytes_sent};
  });
  return result;
}

int main() {
  const std::vector<float> zeros(kNumel, 0);
  const Result plain = train("zero3", false, 0, kSteps, zeros);
  const Result rounded = train("zero3", true, 0, kSteps, zeros);
  bool ok = true;
  for (const std::string& strategy : shard::Placement::preset_names())
    ok = ok && train(strategy, true, 0, kSteps, zeros).weight == rounded.weight;
  const Result half = train("zero3", true, 0, kSteps / 2, zeros);
  ok = ok && train("zero3", true, kSteps / 2, kSteps, half.weight).weight == rounded.weight;
  std::printf("%s: equal bits under all strategies, and of a run that goes on\n",
              ok ? "ok" : "FAILED");
  // A rank sends the others their parts of each gradient, in 2 bytes for 4.
  const std::int64_t saved = plain.bytes_sent - rounded.bytes_sent;
  const std::int64_t in_bf16 =
      std::int64_t(kSteps) * kMicroSteps * kNumel * 2 * (kRanks - 1) / kRanks;
  // Of n draws that are 2^-7 with probability 1/8 the mean has a deviation of 2^-7 sqrt(7/64 / n).
  const auto& w = rounded.weight;
  const double mean = -std::accumulate(w.begin(), w.end(), 0.0) / kNumel;
  const double n = double(kSteps) * kMicroSteps * kRanks * kNumel;
  const double bound = 5 * 0x1p-7 * std::sqrt(7.0 / 64 / n);
  std::printf("saved %ld of %ld bytes; mean %.6f for %.6f, within %.6f\n", saved, 2 * in_bf16, mean,
              kGradient, bound);
  ok = ok && saved == in_bf16 && std::abs(mean - kGradient) < bound;
  return ok ? 0 : 1;
}

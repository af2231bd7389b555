// Planning a model of one's own: a step of rank 0 of 64 that are not there, with no memory taken.
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include "comm/meta.h"
#include "engine/meta.h"
#include "engine/tape.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tensor;

constexpr std::int64_t kWidth = 8192, kBatch = 16;
constexpr int kLayers = 48, kRanks = 64;

struct Layer {
  explicit Layer(const std::string& name)
      : weight{name + ".weight", {kWidth, kWidth}, engine::Init::normal(0.02f)},
        block{name, {&weight}} {}

  engine::Parameter weight;
  engine::Block block;
};

// Bytes that rank 0 holds at most while it trains.
std::int64_t peak_nbytes(const shard::FsdpOptions& options) {
  const auto world = comm::make_meta_rank(0, kRanks);
  const auto compute = engine::Stream::meta("compute", engine::DeviceKind::kCpu, {});
  const engine::Memory memory(compute);
  engine::Tape tape(memory, compute);
  std::deque<Layer> layers;  // parameters do not move
  std::vector<engine::Block*> blocks;
  for (int i = 0; i < kLayers; ++i) {
    blocks.push_back(&layers.emplace_back("fc" + std::to_string(i)).block);
  }
  shard::Fsdp fsdp(*world, memory, compute, blocks, /*root=*/nullptr, options);
  shard::AdamW optimizer(fsdp, {});
  for (int step = 0; step < 2; ++step) {  // the first has no gathers ahead
    fsdp.begin_step();
    Tensor x = tape.empty({kBatch, kWidth}, engine::DType::kF32, "x");
    for (Layer& layer : layers)
      x = tape.region(layer.block,
                      [&] { return ops::relu(tape, ops::linear(tape, x, layer.weight, nullptr)); });
    tape.backward(ops::sum(tape, x));
    optimizer.step(/*lr=*/1e-3, fsdp.finish_step(), /*max_norm=*/1);
  }
  const std::int64_t peak = memory.stats().peak_total_nbytes;
  std::printf("peak %6.2f GiB, %7.2f GiB sent, %6.2f simulated seconds\n",
              static_cast<double>(peak) / (1 << 30),
              static_cast<double>(world->traffic().bytes_sent) / (1 << 30),
              static_cast<double>(meta_now_ns(compute)) * 1e-9);
  return peak;
}

int main() {
  const std::int64_t ddp = peak_nbytes({.placement = shard::Placement::preset("ddp")});
  const std::int64_t zero3 = peak_nbytes({.placement = shard::Placement::preset("zero3")});
  // Parameters, gradients and two states in f32: 16 B of each parameter, whole or a 64th.
  constexpr std::int64_t kStateNbytes = 16 * kLayers * kWidth * kWidth;
  return ddp >= kStateNbytes && zero3 >= kStateNbytes / kRanks && zero3 < kStateNbytes / 16 ? 0 : 1;
}

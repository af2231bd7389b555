// Training that averages its weights, writes a log of JSON lines, and evaluates the average over
// two ranks, of which one has more batches than the other. The log goes to the file that the first
// argument names, or to standard output.
#include <array>
#include <cmath>

#include "comm/threads.h"
#include "engine/copy.h"
#include "mlp.h"
#include "ops/losses/losses.h"
#include "shard/ema.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "sum_over_ranks.h"
#include "tools/io/jsonl.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
namespace tools = tessera::tools;
using engine::DType, engine::Tape, engine::Tensor;

constexpr int kBatches = 5;  // to evaluate with

// The mean squared error over points of a curve, which are known up to `noise`.
Tensor loss(Tape& tape, Mlp& model, engine::RandomStream random, std::int64_t rows, float noise) {
  const Tensor x = tape.empty({rows, 1}, DType::kF32, "x");
  const Tensor y = tape.empty({rows, 1}, DType::kF32, "y");
  for (std::size_t i = 0; i < x.span<float>().size(); ++i) {
    const float at = x.span<float>()[i] = 4 * random.uniform(i) - 2;
    y.span<float>()[i] = std::sin(3 * at) + noise * random.normal(1000 + i);
  }
  return ops::mse(tape, model(tape, x), y);
}

// Every `step`-th batch from `first` on: the sum of squared errors, and the number of points.
std::array<float, 2> evaluate(Tape& tape, Mlp& model, int first, int step) {
  std::array<float, 2> sums = {};
  for (int batch = first; batch < kBatches; batch += step) {
    const std::int64_t rows = batch == kBatches - 1 ? 21 : 64;  // the last one is short
    const engine::RandomStream random{/*seed=*/1000000, static_cast<std::uint64_t>(batch)};
    const Tensor mean = tape.no_grad([&] { return loss(tape, model, random, rows, /*noise=*/0); });
    sums[0] += mean.item() * static_cast<float>(rows);
    sums[1] += static_cast<float>(rows);
  }
  return sums;
}

void train(comm::ProcessGroup& world, tools::JsonlWriter& log) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Mlp model("mlp", {1, 64, 64, 1});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0.01});
  shard::Ema ema(fsdp);
  float mean = 0;
  for (std::uint64_t step = 1; step <= 500; ++step) {
    fsdp.begin_step();
    const Tensor mine = loss(tape, model, {step, std::uint64_t(world.rank())}, 64, 0.3f);
    tape.backward(mine);
    adam.step(/*lr=*/1e-2, fsdp.finish_step(), /*max_norm=*/1);
    ema.update(/*decay=*/0.98);
    if (step % 100 != 0) continue;
    // Forwards in keep_gathered() send nothing, so ranks may make different numbers of them. But
    // the first one in swap_in() gathers the averages, so each rank makes one at least.
    std::array<float, 2> sums = {};
    fsdp.keep_gathered(
        [&] { ema.swap_in([&] { sums = evaluate(tape, model, world.rank(), world.size()); }); });
    const auto [sum, count] = sum_over_ranks(world, tape, sums);
    mean = sum / count;
    tools::JsonRecord record;
    record.add("step", step).add("loss", mine.item()).add("eval_loss", mean);
    if (world.rank() == 0) log.write(record);
  }

  // What this rank alone comes to: a model without Fsdp, the values of the average, all batches.
  Mlp copy("copy", {1, 64, 64, 1});
  for (std::size_t i = 0; i < copy.blocks().size(); ++i) {
    const auto &from = model.blocks()[i]->parameters, &to = copy.blocks()[i]->parameters;
    engine::materialize(to, memory, /*seed=*/1);
    for (std::size_t j = 0; j < to.size(); ++j)
      engine::copy_from_floats(to[j]->value, ema.full_average(*from[j]));
  }
  const auto [sum, count] = evaluate(tape, copy, 0, 1);
  const float alone = sum / count;
  if (world.rank() == 0) log.write(tools::JsonRecord().add("eval_loss_alone", alone));
  // Batches have the same bits in both. Sums of batches are made in other orders: at most kBatches
  // additions of positive numbers and a division, each of which rounds by 2^-24 of the result.
  const float bound = 2 * (kBatches + 1) * 0x1p-24f * alone;
  engine::require(std::abs(mean - alone) <= bound && alone < 0.05f,
                  "[evaluation] expected a loss of {}, and below 0.05, got {}", alone, mean);
}

int main(int argc, char** argv) {
  tools::JsonlWriter log(argc > 1 ? argv[1] : "/dev/stdout");
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) { train(world, log); });
}

// Training on files of unequal lengths, which ranks share out: who has no batch left joins in what
// the others do. On any number of ranks it ends with the bits of one process that reads all files.
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "mlp.h"
#include "ops/losses/losses.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape, engine::Tensor;

constexpr std::array<int, 3> kBatches = {7, 4, 2};  // that each file has

// The mean squared error over points of a curve.
Tensor loss(Tape& tape, Mlp& model, engine::RandomStream random) {
  const Tensor x = tape.empty({32, 1}, engine::DType::kF32, "x");
  const Tensor y = tape.empty({32, 1}, engine::DType::kF32, "y");
  for (std::size_t i = 0; i < 32; ++i) {
    x.span<float>()[i] = 4 * random.uniform(i) - 2;
    y.span<float>()[i] = std::sin(3 * x.span<float>()[i]);
  }
  return ops::mse(tape, model(tape, x), y);
}

// Returns the loss of points that are in no file, and the parameters.
std::vector<float> train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Mlp model("mlp", {1, 32, 32, 1});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::AdamW adam(fsdp, {.weight_decay = 0});
  for (int epoch = 0; epoch < 60; ++epoch) {
    for (int batch = 0;; ++batch) {
      std::vector<std::uint64_t> files;  // of this rank, that have one batch more
      for (int file = world.rank(); file < std::ssize(kBatches); file += world.size())
        if (batch < kBatches[file]) files.push_back(file);
      // The most batches that any rank has for this step; 0: all are done. With one file for each
      // rank it is 1 until then.
      const int n = fsdp.join(static_cast<int>(files.size()));
      if (n == 0) break;
      for (int i = 0; i < n; ++i) {
        i == 0 ? fsdp.begin_step(n) : fsdp.next_micro_step();
        if (i >= std::ssize(files)) continue;  // Fsdp takes part by itself
        const std::uint64_t seed = static_cast<std::uint64_t>(1000 * epoch + batch);
        tape.backward(loss(tape, model, {seed, files[i]}));
      }
      // The gradient is the mean over the batches that there are, not over ranks.
      adam.step(/*lr=*/1e-2, fsdp.finish_step(), /*max_norm=*/1);
    }
  }
  const auto unseen = [&] { return loss(tape, model, {/*seed=*/1000000}); };
  std::vector<float> result = {tape.no_grad(unseen).item()};
  for (const auto* p : fsdp.parameters())
    for (const float value : fsdp.full_parameter(*p)) result.push_back(value);
  return result;
}

int main() {
  std::array<std::vector<float>, 3> results;  // of 1, 2 and 3 ranks
  for (int ranks = 1; ranks <= 3; ++ranks) {
    comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
      const auto mine = train(world);
      if (world.rank() == 0) results.at(ranks - 1) = mine;
    });
  }
  const auto& [one, two, three] = results;
  std::printf("loss %.4f on three ranks, %.4f on two, %.4f on one\n", three[0], two[0], one[0]);
  return three == one && two == one && one[0] < 0.02f ? 0 : 1;
}

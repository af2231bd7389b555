// Trains with the optimizer of lion.h, sharded over two ranks, and on GPU 0 where there is one.
#include <cstdio>
#include <vector>

#include "comm/threads.h"
#include "engine/cuda.h"
#include "engine/tape.h"
#include "lion.h"
#include "ops/linear.h"
#include "ops/mul.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/rule_optimizer.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tensor;

// The norm of the first gradient over that of the last.
float progress(comm::ProcessGroup& world, const engine::Stream& compute) {
  const engine::Memory memory(compute);
  engine::Tape tape(memory, compute);
  engine::Parameter weight{"fc.weight", {8, 8}, engine::Init::normal(0.3f)}, bias{"fc.bias", {8}};
  engine::Block block{"fc", {&weight, &bias}};
  shard::Fsdp fsdp(world, memory, compute, {&block}, /*root=*/nullptr, {});
  shard::RuleOptimizer<Lion> optimizer(fsdp, Lion{}, {"m"}, {{.name = "all"}});
  float first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const Tensor x = Tensor::from<float>(memory, {4, 8}, std::vector<float>(32, 0.5f), "x");
    fsdp.begin_step();
    tape.backward(tape.region(block, [&] {
      const Tensor y = ops::linear(tape, x, weight, &bias);
      return ops::sum(tape, ops::mul(tape, y, y));
    }));
    const shard::GradNorm norm = fsdp.finish_step();
    optimizer.step(/*lr=*/2e-3, norm, /*max_norm=*/0);
    (step == 0 ? first : last) = norm.value();
  }
  return first / last;
}

int main() {
  bool ok = true;
  const auto train = [&](int ranks, bool on_gpu) {
    comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
      const float ratio = progress(world, on_gpu ? engine::Stream::cuda("compute", 0)
                                                 : engine::Stream::inline_cpu("compute"));
      if (world.rank() == 0) {
        std::printf("%s: the gradient fell to 1/%.0f\n", on_gpu ? "GPU" : "CPU", ratio);
        ok = ok && ratio > 10;
      }
    });
  };
  train(2, false);
  if constexpr (engine::kCudaBuilt) {
    if (engine::cuda::num_devices() > 0) train(1, true);
  }
  return ok ? 0 : 1;
}

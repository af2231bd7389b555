// A loss of one's own, made of ops: InfoNCE (van den Oord et al., arXiv:1807.03748). A model learns
// without labels what two noisy views of one thing have in common, with equal bits under every
// strategy.
#include <cmath>
#include <cstdio>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "mlp.h"
#include "ops/bmm.h"
#include "ops/index/gather.h"
#include "ops/rmsnorm.h"
#include "ops/scale.h"
#include "ops/softmax/softmax.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape, engine::Tensor;

constexpr std::int64_t kThings = 8;
constexpr float kTemperature = 0.1f;

// -log of the probability that softmax gives to row i of `b`, (N, C), for row i of `a`, (N, C), by
// the cosines of their angles, as a mean over i. The N - 1 others are this rank's own, so the loss
// is a mean over ranks of what each has with its things.
Tensor info_nce(Tape& tape, const Tensor& a, const Tensor& b) {
  const std::int64_t N = a.dim(0), C = a.dim(1);
  const auto of_length_1 = [&](const Tensor& x) {
    return ops::scale(tape, ops::rmsnorm(tape, x), 1 / std::sqrt(float(C))).reshape({1, N, C});
  };
  const Tensor cosines = ops::bmm(tape, of_length_1(a), of_length_1(b), {.transpose_b = true});
  const Tensor log_p = ops::log_softmax(tape, ops::scale(tape, cosines, 1 / kTemperature));
  std::vector<std::int32_t> own(static_cast<std::size_t>(N));
  std::iota(own.begin(), own.end(), 0);
  const Tensor index = Tensor::from<std::int32_t>(tape.memory(), {N}, own, "own");
  const Tensor log_own = ops::gather(tape, log_p.reshape({N, N}), index);
  return ops::scale(tape, ops::sum(tape, log_own), -1 / float(N));
}

// Things are places on a circle. A view shows the place nearly, and two larger numbers that say
// nothing of it.
Tensor view(Tape& tape, engine::RandomStream random) {
  const Tensor x = tape.empty({kThings, 4}, engine::DType::kF32, "view");
  for (std::size_t i = 0; i < kThings; ++i) {
    const float angle = 6.2832f * float(i) / kThings + 0.05f * random.normal(3 * i);
    x.span<float>()[4 * i] = std::cos(angle);
    x.span<float>()[4 * i + 1] = std::sin(angle);
    x.span<float>()[4 * i + 2] = 2 * random.normal(3 * i + 1);
    x.span<float>()[4 * i + 3] = 2 * random.normal(3 * i + 2);
  }
  return x;
}

// Returns this rank's loss of views that it has not seen, and the parameters.
std::vector<float> train(comm::ProcessGroup& world, const std::string& strategy) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Mlp model("mlp", {4, 32, 8});
  shard::Fsdp fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
                   {.placement = shard::Placement::preset(strategy)});
  shard::AdamW adam(fsdp, {.weight_decay = 0});
  const auto loss = [&](std::uint64_t seed) {
    const std::uint64_t rank = static_cast<std::uint64_t>(world.rank());
    const Tensor a = view(tape, {seed, 2 * rank}), b = view(tape, {seed, 2 * rank + 1});
    return info_nce(tape, model(tape, a), model(tape, b));
  };
  for (std::uint64_t step = 0; step < 200; ++step) {
    fsdp.begin_step();
    tape.backward(loss(step));
    adam.step(/*lr=*/1e-2, fsdp.finish_step(), /*max_norm=*/1);
  }
  const auto unseen = [&] { return loss(/*seed=*/1000000); };
  std::vector<float> result = {tape.no_grad(unseen).item()};
  for (const auto* p : fsdp.parameters())
    for (const float value : fsdp.full_parameter(*p)) result.push_back(value);
  return result;
}

int main() {
  std::set<std::vector<float>> results;  // of rank 0 under each strategy; equal ones are one
  for (const std::string& strategy : shard::Placement::preset_names()) {
    comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
      const auto mine = train(world, strategy);
      if (world.rank() == 0) results.insert(mine);
    });
  }
  const float loss = results.begin()->front(), chance = std::log(float(kThings));
  std::printf("loss %.3f, by chance %.3f; different results: %zu\n", loss, chance, results.size());
  return results.size() == 1 && loss > 0 && loss < chance / 8 ? 0 : 1;
}

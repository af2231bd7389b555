// A generator and a discriminator (Goodfellow et al., arXiv:1406.2661), sharded over two ranks:
// the generator learns to make numbers of a normal distribution around 3.
#include <cmath>
#include <cstdio>

#include "comm/threads.h"
#include "mlp.h"
#include "ops/losses/losses.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tensor;

constexpr std::int64_t kBatch = 64;

struct Gan {
  explicit Gan(comm::ProcessGroup& world)
      : rank(static_cast<std::uint64_t>(world.rank())),
        fsdp_g(world, memory, tape.stream(), g.blocks(), nullptr, options),
        fsdp_d(world, memory, tape.stream(), d.blocks(), nullptr, options) {}

  // Normal numbers, (kBatch, 1), others for each rank and call.
  Tensor normal(float mean, float deviation) {
    const Tensor x = tape.empty({kBatch, 1}, engine::DType::kF32, "x");
    const engine::RandomStream random{++num_draws, rank};
    for (std::size_t i = 0; i < kBatch; ++i)
      x.span<float>()[i] = mean + deviation * random.normal(i);
    return x;
  }
  // How far the discriminator is from calling x real (1) or made (0).
  Tensor mistake(const Tensor& x, float target) {
    const Tensor targets = tape.empty({kBatch, 1}, engine::DType::kF32, "targets");
    for (float& t : targets.span<float>()) t = target;
    return ops::bce_with_logits(tape, d(tape, x), targets);
  }

  void step() {
    // The discriminator learns; what is made is data to it.
    fsdp_d.begin_step();
    const Tensor made = tape.no_grad([&] { return g(tape, normal(0, 1)); });
    tape.backward({mistake(normal(3, 0.5f), 1), mistake(made, 0)});
    fsdp_d.finish_step();
    adam_d.step(kLr);

    // The generator learns through it. Frozen: the discriminator's own gradients are not made, and
    // its wrapper needs no step.
    fsdp_g.begin_step();
    const Tensor fake = g(tape, normal(0, 1));
    tape.backward(tape.frozen([&] { return mistake(fake, 1); }));
    fsdp_g.finish_step();
    adam_g.step(kLr);
  }

  float mean_of_made() {
    const Tensor x = tape.no_grad([&] { return g(tape, normal(0, 1)); });
    float sum = 0;
    for (const float v : x.span<float>()) sum += v;
    return sum / kBatch;
  }

  static constexpr double kLr = 5e-3;
  const shard::FsdpOptions options{.placement = shard::Placement::preset("zero3")};
  const shard::AdamWOptions adam{.beta1 = 0.5};
  std::uint64_t rank, num_draws = 0;
  engine::Memory memory;
  engine::Tape tape{memory, engine::Stream::inline_cpu("compute")};
  Mlp g{"g", {1, 16, 1}}, d{"d", {1, 16, 1}};
  shard::Fsdp fsdp_g, fsdp_d;
  shard::AdamW adam_g{fsdp_g, adam}, adam_d{fsdp_d, adam};
};

int main() {
  float mean = 0;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    Gan gan(world);
    for (int step = 0; step <= 1500; ++step) {
      gan.step();
      if (step % 250 != 0) continue;
      const float now = gan.mean_of_made();
      if (world.rank() == 0)
        std::printf("step %4d: the mean of what is made is %.2f\n", step, mean = now);
    }
  });
  return std::abs(mean - 3) < 0.3f ? 0 : 1;
}

// A small student learns from a teacher's distributions (Hinton et al., arXiv:1503.02531), sharded
// over two ranks. The teacher has learned from labels which of three spiral arms a point lies on;
// the student sees no label.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "comm/threads.h"
#include "mlp.h"
#include "ops/cross_entropy.h"
#include "ops/losses/losses.h"
#include "ops/scale.h"
#include "ops/softmax/softmax.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Tape;
using engine::Tensor;

constexpr std::int64_t kBatch = 64;
constexpr float kTemperature = 2;  // softens both distributions

struct Learner {
  Learner(comm::ProcessGroup& world, const engine::Memory& memory, Tape& tape, const char* name,
          std::int64_t width)
      : model(name, {2, width, width, 3}),
        fsdp(world, memory, tape.stream(), model.blocks(), nullptr,
             {.placement = shard::Placement::preset("zero3")}) {}

  Mlp model;
  shard::Fsdp fsdp;
  shard::AdamW adam{fsdp, {.weight_decay = 0.01}};
};

// Points of rank `rank` in step `step`, and their arms.
void draw(const engine::RandomStream& random, const Tensor& x, const Tensor& arm) {
  for (std::size_t i = 0; i < kBatch; ++i) {
    const float radius = random.uniform(i);
    const float angle = 5 * radius + 2.0944f * static_cast<float>(i % 3);
    arm.span<std::int32_t>()[i] = static_cast<std::int32_t>(i % 3);
    x.span<float>()[2 * i] = radius * std::cos(angle);
    x.span<float>()[2 * i + 1] = radius * std::sin(angle);
  }
}

float train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Learner teacher(world, memory, tape, "teacher", 64), student(world, memory, tape, "student", 24);
  const Tensor x = tape.empty({kBatch, 2}, engine::DType::kF32, "x");
  const Tensor arm = tape.empty({kBatch}, engine::DType::kI32, "arm");
  const auto step = [&](Learner& learner, std::uint64_t number, const auto& loss_of) {
    draw({number, static_cast<std::uint64_t>(world.rank())}, x, arm);
    learner.fsdp.begin_step();
    tape.backward(loss_of());
    learner.fsdp.finish_step();
    learner.adam.step(/*lr=*/5e-3);
  };
  const auto softened = [&](Mlp& model) {
    return ops::scale(tape, model(tape, x), 1 / kTemperature);
  };

  for (std::uint64_t n = 0; n < 600; ++n)
    step(teacher, n, [&] { return ops::cross_entropy(tape, teacher.model(tape, x), arm); });
  for (std::uint64_t n = 600; n < 1400; ++n) {
    step(student, n, [&] {
      const Tensor target =
          tape.no_grad([&] { return ops::softmax(tape, softened(teacher.model)); });
      return ops::kl_divergence(tape, ops::log_softmax(tape, softened(student.model)), target);
    });
  }
  draw({2000, static_cast<std::uint64_t>(world.rank())}, x, arm);
  return tape.no_grad([&] { return ops::cross_entropy(tape, student.model(tape, x), arm); }).item();
}

int main() {
  float loss = 0;
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    const float mine = train(world);
    if (world.rank() == 0) loss = mine;
  });
  std::printf("cross-entropy of the student, who saw no label: %.4f\n", loss);
  return loss < 0.3f ? 0 : 1;
}

// A mixture of experts, trained with one expert on each of four ranks: tokens travel to their
// expert and back, dense parameters are sharded over all ranks, and one norm clips both. The task:
// y is one of four functions of x, and which one is seen from x alone.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/tape.h"
#include "ops/add.h"
#include "ops/cross_entropy.h"
#include "ops/dispatch.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "ops/route.h"
#include "ops/scale.h"
#include "shard/all_to_all.h"
#include "shard/fsdp.h"
#include "shard/joint_norm.h"
#include "shard/optimizer/adamw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace ops = tessera::ops;
namespace shard = tessera::shard;
using engine::Init;
using engine::Tensor;

constexpr std::int64_t kTokens = 64, kWidth = 16, kHidden = 32;

class Moe {
 public:
  // `group`: an expert on each of its ranks. Names differ, and so do initial values.
  explicit Moe(comm::ProcessGroup& group) : Moe(group, "expert." + std::to_string(group.rank())) {}

  // x (kTokens, 2) -> loss.
  Tensor loss(engine::Tape& tape, const Tensor& x, const Tensor& targets) {
    return tape.region(dense, [&] {
      const Tensor h = ops::relu(tape, ops::linear(tape, x, in_, &in_bias_));
      // Each rank sends an expert at most twice its even share; what is over passes it by.
      const std::int64_t num_experts = group_.size(), capacity = 2 * kTokens / num_experts;
      const ops::Routing route =
          ops::route(tape, ops::linear(tape, h, router_, nullptr), {.k = 1, .capacity = capacity});
      // One buffer for this rank's one expert, with a block of rows for each rank's.
      Tensor rows = ops::dispatch(tape, h, route.slots, 1, num_experts * capacity).front();
      rows = tape.region(expert, [&] {
        Tensor t = shard::all_to_all(tape, group_, rows, "tokens");
        t = ops::linear(tape, ops::relu(tape, ops::linear(tape, t, w1_, nullptr)), w2_, nullptr);
        return shard::all_to_all(tape, group_, t, "results");
      });
      const Tensor y = ops::combine(tape, {rows}, route.gates, route.slots);
      const Tensor logits = ops::linear(tape, ops::add(tape, h, y), out_, nullptr);
      return ops::add(tape, ops::cross_entropy(tape, logits, targets),
                      ops::scale(tape, route.aux, 0.01f));
    });
  }

 private:
  Moe(comm::ProcessGroup& group, const std::string& name)
      : group_(group),
        w1_{name + ".w1", {kWidth, kHidden}, Init::normal(0.3f)},
        w2_{name + ".w2", {kHidden, kWidth}, Init::normal(0.3f)},
        expert{name, {&w1_, &w2_}} {}

  comm::ProcessGroup& group_;
  engine::Parameter w1_, w2_;
  engine::Parameter in_{"in", {2, kWidth}, Init::normal(1)}, in_bias_{"in.bias", {kWidth}};
  engine::Parameter router_{"router", {kWidth, 4}, Init::normal(0.3f)};
  engine::Parameter out_{"out", {kWidth, 2}, Init::normal(0.3f)};

 public:
  engine::Block expert, dense{"dense", {&in_, &in_bias_, &router_, &out_}};
};

float train(comm::ProcessGroup& world) {
  const engine::Memory memory;
  engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
  // Groups of their own: one for the exchange, and one for the owners of an expert, here a rank.
  const auto exchange = world.split(0, world.rank()), owner = world.split(world.rank(), 0);
  Moe model(*exchange);
  shard::Fsdp dense(world, memory, tape.stream(), {}, &model.dense, {});
  // An expert sees the tokens of all ranks, so its gradient is a mean over all ranks, too.
  shard::Fsdp experts(*owner, memory, tape.stream(), {&model.expert}, nullptr,
                      {.mean_ranks = world.size()});
  shard::AdamW dense_optimizer(dense, {}), expert_optimizer(experts, {});
  float mean = 0;
  for (std::uint64_t step = 0; step < 400; ++step) {
    const Tensor x = tape.empty({kTokens, 2}, engine::DType::kF32, "x");
    const Tensor targets = tape.empty({kTokens}, engine::DType::kI32, "targets");
    const engine::RandomStream random{step, std::uint64_t(world.rank())};
    for (std::int64_t i = 0; i < kTokens; ++i) {
      const auto at = static_cast<std::uint64_t>(2 * i);
      const float a = 2 * random.uniform(at) - 1, b = 2 * random.uniform(at + 1) - 1;
      x.data<float>()[2 * i] = a;
      x.data<float>()[2 * i + 1] = b;
      const float functions[] = {a + b, a - b, std::abs(a) - 0.5f, std::abs(b) - 0.5f};
      targets.data<std::int32_t>()[i] = functions[(a > 0 ? 1 : 0) + (b > 0 ? 2 : 0)] > 0 ? 1 : 0;
    }
    dense.begin_step();
    experts.begin_step();
    const Tensor loss = model.loss(tape, x, targets);
    tape.backward(loss);
    const shard::GradNorm dense_norm = dense.finish_step(), expert_norm = experts.finish_step();
    const std::vector<shard::NormPart> parts = {{dense, dense_norm}, {experts, expert_norm}};
    // What one norm clips is also skipped together, should the options say so and a gradient not be
    // finite.
    const shard::JointNorm norm = shard::joint_norm(world, parts);
    dense_optimizer.step(/*lr=*/1e-2, norm, /*max_norm=*/1);
    expert_optimizer.step(/*lr=*/1e-2, norm, /*max_norm=*/1);
    mean = step == 0 ? loss.item() : 0.95f * mean + 0.05f * loss.item();
    if (world.rank() == 0 && step % 100 == 0) std::printf("step %3lu loss %.4f\n", step, mean);
  }
  return mean;
}

int main() {
  float loss = 0;
  comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
    const float mine = train(world);
    if (world.rank() == 0) loss = mine;
  });
  std::printf("final loss %.4f\n", loss);
  return loss < 0.25f ? 0 : 1;
}
